"""How much of a burst of prompts a prefill engine stores, and what new prompts wait for that."""
