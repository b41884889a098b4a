"""Prompts of random tokens, none like another."""

from __future__ import annotations

import random

__all__ = ["draw_tokens", "fresh_hashes"]


def draw_tokens(rng: random.Random, count: int, vocabulary: int, first: int = 0) -> list[int]:
    """So many token ids, from `first` on and below `vocabulary`."""
    return [rng.randrange(first, vocabulary) for _ in range(count)]


def fresh_hashes(rng: random.Random, num_blocks: int) -> list[bytes]:
    """Prefix hashes of a chain that nobody has: 32 bytes each."""
    data = rng.randbytes(32 * num_blocks)
    return [data[at : at + 32] for at in range(0, len(data), 32)]
