"""Rooms of benchmarks.trace_replay."""
