"""How much of what requests compute is stored, and what held GPU blocks cost the next request."""
