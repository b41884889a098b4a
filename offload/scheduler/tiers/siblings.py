"""What siblings have: engines of this host whose pools outlive them, below the same path."""

from collections.abc import Callable, Sequence
from math import inf

from allocator import StorePlan
from offload.naming import ROOT, rows
from offload.scheduler.tiers.beliefs import FRESH_SECONDS
from offload.scheduler.tiers.fetches import Fetches
from offload.scheduler.tiers.names import Path, name_of
from offload.scheduler.tiers.shared import SharedDirectory, SharedReading

ALONE_SECONDS = 1.0
"""Who was alone is believed to be for that long: a step of an engine that had so long a rest is short."""


class SiblingDirectory(SharedDirectory):
    """Beliefs as of a store, in which nothing is written.

    While there is no sibling, or none that has anything, nobody waits for an answer. Whether there is one is
    asked when somebody would have a use for it, beside the first question after a while. What was missed is
    asked again soon: siblings say what they have. After a reset they have nothing for this engine.
    """

    _is_over = False
    _known_at = -inf
    _is_alone = False

    def find(self, request_id: str, names: Sequence[bytes]) -> int | None:
        return 0 if self._is_useless(request_id) else super().find(request_id, names)

    def find_checkpoint(
        self, request_id: str, chain: Sequence[bytes], limit: int, path_to: Callable[[int], Path]
    ) -> int | None:
        if self._is_useless(request_id):
            return 0
        return super().find_checkpoint(request_id, chain, limit, path_to)

    def drop(self, names: Sequence[bytes], index: int) -> int:
        return self._forget(names, index, FRESH_SECONDS)

    def reset(self) -> None:
        super().reset()
        self._is_over = True

    # Private

    def _is_useless(self, request_id: str) -> bool:
        """Whether nobody has anything, as far as is known of late."""
        if self._is_over:
            return True
        if self._known_at < self._clock() - (ALONE_SECONDS if self._is_alone else FRESH_SECONDS):
            self._is_alone = False
            self._probes.ask(request_id, ROOT, rows([ROOT]), self._learn_others, suffix=self._suffix)
        return self._is_alone

    def _learn_others(self, num_found: int) -> None:
        self._known_at, self._is_alone = self._clock(), not num_found


class SiblingFetches(Fetches):
    """The only flow that moves bytes, so it tells what is known of siblings of a reset.

    They know no extents: a name is that of a position, and what is read ends there.
    """

    _directory: SiblingDirectory

    def reset(self) -> list[int]:
        self._directory.reset()
        return super().reset()

    # Private

    def _read(self, plan: StorePlan, path: Path, first: int, last: int) -> SharedReading:
        names = path.names
        if plan.bag is None:
            names = [*names[: last - 1], name_of(plan.hashes[-1])]
        return self._directory.read(names, first, last)
