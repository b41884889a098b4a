"""``kv-offload size``: hit rate against the capacity of the pool."""
