"""Files that outlive a process: private, owned by one process at a time, and checked when they are read."""
