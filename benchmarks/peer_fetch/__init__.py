"""How fast KV comes from a peer's pool."""
