"""Parts of the copy bandwidth benchmark, see `benchmarks.copy_bandwidth`."""
