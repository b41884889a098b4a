"""Parts of benchmarks.trace_replay."""
