"""Prompts of random tokens, none like another."""

from __future__ import annotations

import random

__all__ = ["draw_tokens"]


def draw_tokens(rng: random.Random, count: int, vocabulary: int, first: int = 0) -> list[int]:
    """So many token ids, from `first` on and below `vocabulary`."""
    return [rng.randrange(first, vocabulary) for _ in range(count)]
