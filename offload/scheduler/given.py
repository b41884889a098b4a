"""What requests that run were given at first is claimed: the pool may lack it, and its tree may not."""

from collections.abc import Sequence
from itertools import islice
from typing import NamedTuple

from allocator import Pin
from offload.scheduler.common import Common
from offload.scheduler.engine import Request
from offload.scheduler.leavings import Leavings

_LOOKED_BACK = 8
"""Requests that run, the newest, that may lose slots for one store."""


class _Given(NamedTuple):
    """Leading positions of a request's chain, which are claimed."""

    chain: Sequence[bytes]
    stop: int
    claim: Pin


class Given:
    """By request. What is no longer needed is claimed until the step ends: others may be given it in that."""

    def __init__(self, common: Common, left: Leavings) -> None:
        """Nobody runs; ``left`` says what earns room in the pool."""
        self._hollow = common.allocator.hollow
        self._engine = common.engine
        self._left = left
        self._running: dict[str, _Given] = {}
        self._has_twice: dict[str, _Given] = {}  # of these, some of which the pool may have, too
        self._over: list[Pin] = []

    def __len__(self) -> int:
        """Claims."""
        return len(self._running) + len(self._over)

    @property
    def requests(self) -> list[str]:
        """For which something is claimed."""
        return list(self._running)

    @property
    def has_twice(self) -> bool:
        """Whether the pool may have some of it."""
        return bool(self._has_twice)

    def begins(self, request: Request, stop: int) -> None:
        """It has so many leading positions, and what it was given before it has no more."""
        before, chain = self._running.pop(request.request_id, None), self._engine.chain(request)
        self._has_twice.pop(request.request_id, None)
        claim = self._hollow.claim(chain, stop)
        if claim is not None:
            self._running[request.request_id] = given = _Given(chain, stop, claim)
            if self._hollow.has_slots(claim):
                self._has_twice[request.request_id] = given
        if before is not None:
            self._hollow.end(before.claim)

    def preempted(self, request_id: str) -> None:
        """It has lost its blocks. What the pool has of it is needed."""
        self._has_twice.pop(request_id, None)

    def ends(self, request_id: str) -> None:
        """It is over."""
        if (given := self._running.pop(request_id, None)) is not None:
            self._has_twice.pop(request_id, None)
            self._over.append(given.claim)

    def claim_for_step(self, chain: Sequence[bytes], stop: int) -> None:
        """Somebody may be given that in this step."""
        if (claim := self._hollow.claim(chain, stop)) is not None:
            self._over.append(claim)

    def let_go(self) -> None:
        """The step ends."""
        for claim in self._over:
            self._hollow.end(claim)
        self._over.clear()

    def empty(self, num_slots: int) -> int:
        """Have so many slots free, of what the GPU has, too. Returns how many that makes free."""
        num_emptied = 0
        for name, each in list(islice(reversed(self._has_twice.items()), _LOOKED_BACK)):
            if not self._left.earns_room(each.claim):
                continue
            num_emptied += self._hollow.empty(each.chain, 0, each.stop, num_slots - num_emptied)
            if num_emptied >= num_slots:
                break
            if self._hollow.lacking(each.chain, 0, each.stop).all():  # or loads read the rest
                del self._has_twice[name]
        return num_emptied

    def check_invariants(self) -> None:
        """Whoever may lose slots runs."""
        assert self._has_twice.keys() <= self._running.keys(), f"{list(self._has_twice)} do not all run"
