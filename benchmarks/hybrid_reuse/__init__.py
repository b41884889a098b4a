"""Documents asked again on models with windows or states: parts of `python -m benchmarks.hybrid_reuse`."""
