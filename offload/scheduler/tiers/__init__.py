"""Tiers below the pool, on the scheduler's side: what they have, what is spilled and what is fetched."""
