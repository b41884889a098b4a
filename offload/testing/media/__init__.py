"""Media for tests: in memory, and wrongly on purpose."""
