"""What an engine answered, and how far two answers are apart."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

BLOCK_SIZE = 32
"""Tokens per block of every engine here; the CPU backend takes multiples of 32."""

BLOCK_BYTES = 128 << 10
"""Bytes of KV in a block of the tiny model, all layers."""

VOCAB_SIZE = 256

TOLERANCE = 1e-4
"""Between a cold run and one with a cached prefix: float32 sums in another order."""

SEEN = 1e-2
"""The least that a wrong block must make; it makes about 1."""

ALL_RESTORED = {"restore": "always", "store": "eager"}
"""Of engines whose tests say how much is restored, whatever the default is."""

Prompt = list[int]


class Answer(NamedTuple):
    """One request's output.

    Attributes:
        tokens: generated token ids.
        logprobs: ``float64[len(tokens), VOCAB_SIZE]``, the whole distribution each was drawn from.
        num_cached: prompt tokens that were not computed, whichever tier they came from.
    """

    tokens: tuple[int, ...]
    logprobs: npt.NDArray[np.float64]
    num_cached: int


def prompt_of(num_tokens: int, seed: int) -> Prompt:
    """Random token ids without the special ones; unlike seeds share no block."""
    return np.random.default_rng(seed).integers(3, VOCAB_SIZE, num_tokens).tolist()


def comparable(first: Answer, second: Answer) -> int:
    """Leading tokens of both that were drawn after the same text: up to and with the first that differ."""
    pairs = zip(first.tokens, second.tokens, strict=True)
    return next((at + 1 for at, (one, other) in enumerate(pairs) if one != other), len(first.tokens))


def difference(first: Answer, second: Answer) -> float:
    """The largest difference between log-probabilities that were drawn after the same text.

    Greedy tokens follow from these: where they agree within a tolerance, tokens can only differ where two
    of them were as close as that.
    """
    num_tokens = comparable(first, second)
    return float(np.abs(first.logprobs[:num_tokens] - second.logprobs[:num_tokens]).max())


def largest_difference(first: Sequence[Answer], second: Sequence[Answer]) -> float:
    """``difference`` of the pair that is furthest apart."""
    return max(difference(one, other) for one, other in zip(first, second, strict=True))
