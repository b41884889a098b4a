"""What moves, when, and whether it pays: the scheduler's side. No torch, no worker."""
