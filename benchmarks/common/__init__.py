"""What several benchmarks share: reports, arguments, models, servers."""
