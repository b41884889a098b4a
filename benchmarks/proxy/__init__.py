"""Parts of benchmarks.proxy."""
