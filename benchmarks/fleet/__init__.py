"""Parts of benchmarks.fleet."""
