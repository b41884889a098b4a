"""How fast a store is, see `benchmarks.store_tier`."""
