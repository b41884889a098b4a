"""Parts of benchmarks.partial_arrival."""
