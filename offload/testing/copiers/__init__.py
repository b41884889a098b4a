"""Copiers and executors for tests and benchmarks: clocks, links and faults are their arguments."""
