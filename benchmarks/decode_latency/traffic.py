"""The side prompts: all new, or every second one asked before."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count, cycle, islice

import numpy as np

from benchmarks.decode_latency.settings import LatencySettings
from benchmarks.long_document_qa.workload import Prompt

__all__ = ["TRAFFICS", "Traffic"]

TRAFFICS = ("new", "again")
_FIRST_ID = 3
_SIDE = 2**31 + 2  # part of the seed; no other prompts have it


class Traffic:
    """One kind of traffic, the same for every engine that it is made for.

    - new: no prompt was asked before, so a connector only stores.
    - again: every second prompt is of the next document in a cycle that is longer than the GPU's memory, so a
      connector restores it. The others are new, so it stores beside.
    """

    def __init__(self, settings: LatencySettings, kind: str, start: int) -> None:
        """Args: the settings, one of `TRAFFICS`, and which start of the engines it is for (a seed)."""
        self._settings = settings
        self._rng = np.random.default_rng([settings.workload.seed, _SIDE, start, TRAFFICS.index(kind)])
        self._known = [self._document() for _ in range(settings.cycle_documents)] if kind == "again" else []
        self._prompts = self._all()

    def to_prime(self) -> list[Prompt]:
        """What has to be asked once before the first round, one after the other has been stored."""
        return [self._ask(document) for document in self._known]

    def next_round(self) -> list[Prompt]:
        """The side prompts of one more round."""
        return list(islice(self._prompts, self._settings.side_prompts))

    def _all(self) -> Iterator[Prompt]:
        known = cycle(self._known) if self._known else None
        for number in count():
            document = next(known) if known and number % 2 == 0 else self._document()
            yield self._ask(document)

    def _document(self) -> Prompt:
        return self._random(self._settings.workload.document_tokens)

    def _ask(self, document: Prompt) -> Prompt:
        return np.concatenate([document, self._random(self._settings.workload.question_tokens)])

    def _random(self, tokens: int) -> Prompt:
        vocab_size = self._settings.workload.vocab_size
        return self._rng.integers(_FIRST_ID, vocab_size, size=tokens, dtype=np.int32)
