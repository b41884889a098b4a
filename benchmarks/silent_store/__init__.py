"""What a store that never answers costs the scheduler; see ``__main__``."""
