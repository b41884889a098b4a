"""Tells what pools of other sizes would have found for the requests of this engine."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from offload.config import OffloadConfig
from offload.scheduler.answers import AnswerReuse
from offload.scheduler.common import Common
from offload.scheduler.engine import Request
from offload.scheduler.miniatures import SIZES, Miniatures, Sample


class _Seen(NamedTuple):
    """What is known of a request that runs: so many positions of its chain, and those in the sample."""

    num_positions: int
    sample: Sample


@dataclass(slots=True, eq=False)
class OtherSizes:
    """Feeds miniatures with requests as they are admitted and end, and shows what these say.

    Nothing is told of models with windows or states: what they find depends on bags, too.
    """

    common: Common
    answers: AnswerReuse
    miniatures: Miniatures | None = None
    _seen: dict[str, _Seen] = field(default_factory=dict)

    @classmethod
    def of(cls, common: Common, answers: AnswerReuse, config: OffloadConfig) -> "OtherSizes":
        """For that pool. ``answers``: says whether they are stored."""
        made = cls(common, answers)
        if not common.engine.groups.has_bags:
            num_positions = made._num_positions
            made.miniatures = Miniatures(num_positions, config.eviction_policy, common.clock)
        return made

    def admitted(self, request: Request) -> None:
        """For the first time."""
        if self.miniatures is not None:
            chain = self.common.engine.chain(request)[: request.num_prompt_tokens // self.common.block_size]
            self._seen[request.request_id] = _Seen(len(chain), self.miniatures.asked(chain))

    def finish(self, request: Request, ending: int | None) -> None:
        """It is over, and its answer has ended so, if that is known.

        What it has computed behind its prompt is in the pool if answers are stored.
        """
        seen = self._seen.pop(request.request_id, None)
        if seen is not None and self.miniatures is not None:
            more: Sequence[bytes] = ()
            if self.answers.is_open:
                num_full = request.num_computed_tokens // self.common.block_size
                more = self.common.engine.chain(request)[seen.num_positions : num_full]
            self.miniatures.finished(seen.sample, more, ending)

    def step(self) -> None:
        """A step is planned."""
        if self.miniatures is not None:
            self.miniatures.step()

    def reset(self) -> None:
        """All KV is forgotten. Of requests that run, what they compute is not told any more."""
        self._seen.clear()
        if self.miniatures is not None:
            self.miniatures.reset()

    def resized(self) -> None:
        """The pool has another size. What was seen is of another one."""
        if self.miniatures is not None:
            self.miniatures.resize(self._num_positions)

    def show(self) -> None:
        """Count and show how things stand. O(sizes)."""
        if self.miniatures is None:
            return
        metrics, size = self.common.metrics, self.common.block_size
        num_asked, num_missed = self.miniatures.take()
        metrics.count("asked_tokens", num_asked * size)
        for label, missed in zip(_LABELS, num_missed, strict=True):
            metrics.count("missed_tokens_at_size", missed * size, label)
        for label, rate in zip(_LABELS, self.miniatures.hit_rates(), strict=True):
            metrics.show("hit_rate_at_size", round(rate, 4), label)

    def left_over(self) -> list[str]:
        """Requests that are known. For tests."""
        return list(self._seen)

    def check_invariants(self) -> None:
        """Nobody is known where nothing is told."""
        assert self.miniatures is not None or not self._seen, f"{len(self._seen)} requests are known"
        if self.miniatures is not None:
            self.miniatures.check_invariants()

    @property
    def _num_positions(self) -> int:
        return max(1, self.common.allocator.capacity // max(1, self.common.allocator.columns))


_LABELS = tuple(f"{size:g}" for size in SIZES)
