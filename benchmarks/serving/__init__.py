"""`vllm serve` as a process of its own, and what is asked of a server over HTTP; for benchmarks and tests."""
