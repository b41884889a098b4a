"""Real engines and servers of vLLM, each in processes of its own, for tests and benchmarks."""
