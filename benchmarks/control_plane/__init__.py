"""What a connector costs the scheduler's process: parts of `python -m benchmarks.control_plane`."""
