"""How much of what a real server computes is stored, and what that costs the next request."""
