"""Parts of the disk bandwidth benchmark, see `benchmarks.disk_bandwidth`."""
