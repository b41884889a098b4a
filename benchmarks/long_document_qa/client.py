"""What asking an engine has in common, whether it runs here or behind HTTP."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence

from benchmarks.long_document_qa.measure import Counters, RoundResult
from benchmarks.long_document_qa.settings import Workload
from benchmarks.long_document_qa.workload import Prompt, warm_up_prompts

__all__ = ["Client"]

_SETTLE_SECONDS = 0.05
_SETTLE_TRIES = 100
_SHORT_TOKENS = 8  # shorter than any block, hence never cached


class Client(ABC):
    """Asks in a closed loop: `workload.concurrency` requests in flight, the next sent when one ends."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self._short = warm_up_prompts(workload, 1)[0][:_SHORT_TOKENS]

    @abstractmethod
    def ask(self, prompts: Sequence[Prompt], output_tokens: int, on_done: Callable[[], None]) -> list[float]:
        """Ask all prompts, calling `on_done` after each; return seconds to the first token of each."""

    @abstractmethod
    def counters(self) -> Counters:
        """Read the engine's counters, as far as it has reported them."""

    def run_round(self, prompts: Sequence[Prompt], on_done: Callable[[], None]) -> RoundResult:
        """Ask all prompts and return what it took.

        Copies still under way after the last answer are not in the seconds, but are waited for before
        the counters are read.
        """
        before = self.counters()
        started = time.perf_counter()
        ttft = self.ask(prompts, self.workload.output_tokens, on_done)
        seconds = time.perf_counter() - started
        return RoundResult(seconds, ttft, sum(map(len, prompts)), self.settle() - before)

    def settle(self) -> Counters:
        """Wait until copies have ended, and return the counters. RuntimeError if they never rest.

        An engine reports counters along with answers, so it is asked something too short to be cached
        until two readings agree.
        """
        reading = None
        for _ in range(_SETTLE_TRIES):
            self.ask([self._short], 1, lambda: None)
            latest = self.counters()
            if latest == reading:
                return latest
            reading = latest
            time.sleep(_SETTLE_SECONDS)
        raise RuntimeError("the engine's counters do not come to rest")
