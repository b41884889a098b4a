"""Engines that hand KV to each other: what one asks of another's pool, and how it is answered."""
