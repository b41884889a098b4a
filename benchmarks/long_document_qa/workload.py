"""The prompts: documents of unique random token ids, and the order in which they are asked.

Orders, for documents 0, 1, 2, ... asked `passes` times:

- tile: pass by pass, each in the same order (0 1 2 3, 0 1 2 3). That is the worst case for a
  least-recently-used cache that is too small.
- random: pass by pass, each freshly shuffled.
- interleave: each document `passes` times in a row (0 0, 1 1, 2 2, 3 3). With several requests in flight,
  that many documents are asked side by side (0 1, 0 1, 2 3, 2 3). So no request meets its own document still
  being computed.

One pass and one document count are a *round* or several: what is asked between two readings of the clock.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from benchmarks.long_document_qa.settings import Workload

__all__ = ["Round", "rounds", "warm_up_prompts"]

_FIRST_ID = 3  # below are the padding, begin and end tokens
_WARM_UP = 2**31  # stands where a document count would; never a real one

Prompt = NDArray[np.int32]


class Round(NamedTuple):
    """Requests that are timed together: `prompts` (arrays of token ids), all of pass `number` (from 1)."""

    number: int
    prompts: list[Prompt]


def rounds(workload: Workload, documents: int) -> Iterator[Round]:
    """Yield the rounds for one document count. Documents differ between counts and between seeds."""
    rng = np.random.default_rng([workload.seed, documents])
    texts = [_random_ids(rng, workload, workload.document_tokens) for _ in range(documents)]
    for group, number in _schedule(workload, documents, rng):
        prompts = [
            np.concatenate([texts[i], _random_ids(rng, workload, workload.question_tokens)]) for i in group
        ]
        yield Round(number, prompts)


def warm_up_prompts(workload: Workload, documents: int) -> list[Prompt]:
    """Return prompts of the same lengths over documents that no round has."""
    rng = np.random.default_rng([workload.seed, _WARM_UP])
    tokens = workload.document_tokens + workload.question_tokens
    return [_random_ids(rng, workload, tokens) for _ in range(documents)]


def _schedule(
    workload: Workload, documents: int, rng: np.random.Generator
) -> Iterator[tuple[list[int], int]]:
    """Yield (document numbers, pass number) for each round."""
    everything = list(range(documents))
    if workload.order == "interleave":
        for first in range(0, documents, workload.concurrency):
            for number in range(1, workload.passes + 1):
                yield everything[first : first + workload.concurrency], number
        return
    for number in range(1, workload.passes + 1):
        yield (rng.permutation(documents).tolist() if workload.order == "random" else everything), number


def _random_ids(rng: np.random.Generator, workload: Workload, tokens: int) -> Prompt:
    return rng.integers(_FIRST_ID, workload.vocab_size, size=tokens, dtype=np.int32)
