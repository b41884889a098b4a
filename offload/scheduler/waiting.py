"""Requests that were given a restore and have not gone on, and who must leave them GPU blocks."""

from collections.abc import Set as AbstractSet
from typing import NamedTuple

from offload.scheduler.engine import Engine, Request, State

_STILL_STEPS = 8
"""In a row. Where steps overlap, a few in which nothing runs are no sign: earlier ones still run."""


class _Waiter(NamedTuple):
    """A request that was given a restore, and GPU blocks that it may need when it goes on."""

    request: Request
    num_needed: int


class Waiting:
    """Who waits for a restore, or for the step after it, and holds GPU blocks meanwhile.

    vLLM takes the blocks of a request away when its restore has failed, and looks at it first when it gives
    out blocks. If there are too few it looks at none behind it, though these may be the ones that have them,
    and wait for nothing else. So where nothing runs it lets them pass, and no restore begins meanwhile.

    A restore that would take blocks which others need to go on waits, and all later ones wait behind it.

    vLLM itself keeps blocks back from restores: what those still need that prefill, or have had a restore.
    One of these may wait for its turn behind whoever is refused a restore for that. So if nothing happens
    for some steps, the request that was refused last is offered none: it is computed.
    """

    def __init__(self, engine: Engine, step_tokens: int) -> None:
        """Begin with none. ``step_tokens``: tokens that a step computes at most."""
        self._engine = engine
        self._groups = engine.groups
        self._step_tokens = step_tokens
        self._waiters: dict[str, _Waiter] = {}
        self._num_needed = 0  # by these
        self._is_idle = False  # nothing ran in the last step
        self._lets_pass: set[str] = set()  # requests whose restores failed
        self._next: str | None = None  # whose restore is to begin before any other
        self._asked: set[str] = set()  # of these, in this step
        self._offered: str | None = None  # who was offered a restore last in this step, and has got no blocks
        self._num_still = 0  # steps in which nothing happened
        self.refused: str | None = None
        """Who is offered no restore, as the scheduler never finds blocks for it."""

    @property
    def names(self) -> AbstractSet[str]:
        """Of the requests that wait."""
        return self._waiters.keys()

    def wait(self, request: Request, num_tokens: int) -> None:
        """It goes on behind so many tokens, once they are here."""
        num_needed = 0
        if self._groups.has_bags:
            num_needed = self._groups.most_blocks(request.num_tokens - num_tokens, self._step_tokens)
        self._waiters[request.request_id] = _Waiter(request, num_needed)
        self._num_needed += num_needed

    def went_on(self, request_id: str) -> bool:
        """That request is admitted, or over. Returns whether it waited."""
        if self._offered == request_id:
            self._offered = None
        if self.refused == request_id:
            self.refused = None
        self._lets_pass.discard(request_id)
        self._asked.discard(request_id)
        if self._next == request_id:
            self._next = None
        waiter = self._waiters.pop(request_id, None) if self._waiters else None
        if waiter is None:
            return False
        self._num_needed -= waiter.num_needed
        return True

    def need(self, request_id: str, num_blocks: int) -> bool:
        """Whether that request must wait: its restore would take GPU blocks that others need to go on."""
        if self._lets_pass or self._next not in (None, request_id):
            return True
        # vLLM reserves too few for windows, and each would wait for what the other has.
        if not self._num_needed or num_blocks + self._num_needed <= self._engine.num_free:
            return False
        self._next = request_id
        self._asked.add(request_id)
        return True

    def must_let_pass(self, request: Request) -> bool:
        """Whether one whose restore has failed may lack GPU blocks that some who wait hold."""
        self.went_on(request.request_id)  # its restore has ended
        if not self._is_idle:
            return False
        num_tokens = request.num_tokens + self._groups.position_tokens  # drafts too
        is_short = self._engine.num_free < self._groups.most_blocks(num_tokens, num_tokens)
        requests = (each.request for each in self._waiters.values())
        if not is_short or not any(self._engine.state(each) is State.WAITS_FOR_KV for each in requests):
            return False
        self._lets_pass.add(request.request_id)
        self._asked.add(request.request_id)
        return True

    def offered(self, request_id: str) -> None:
        """That request is offered a restore; the scheduler now looks for blocks for it."""
        self._offered = request_id

    def end_step(self, *, is_idle: bool, is_still: bool) -> None:
        """All who could be admitted in a step were asked.

        Who was not asked again holds nobody up: something else keeps it from being admitted.

        Args:
            is_idle: nothing runs in the step.
            is_still: no copy is under way either.
        """
        self._is_idle = is_idle
        self._num_still = self._num_still + 1 if is_idle and is_still and self._offered is not None else 0
        if self._num_still >= _STILL_STEPS:
            self.refused, self._num_still = self._offered, 0
        self._offered = None
        if self._lets_pass or self._next is not None:
            self._lets_pass &= self._asked
            if self._next not in self._asked:
                self._next = None
            self._asked.clear()

    def check_invariants(self) -> None:
        """What the waiters need is what was summed up."""
        num_needed = sum(each.num_needed for each in self._waiters.values())
        assert self._num_needed == num_needed, f"{num_needed} are needed, {self._num_needed} counted"
        held_up_by = self._lets_pass | {self._next}
        assert self._offered is None, f"{self._offered} was offered a restore in an earlier step"
        assert self._asked <= held_up_by, f"{self._asked} were asked, restores wait for {held_up_by}"

    def left_over(self) -> dict[str, object]:
        """What has not ended, by name. For tests."""
        return {
            "requests that were restored": list(self._waiters),
            "requests that let pass": list(self._lets_pass),
            "request to be restored next": [] if self._next is None else [self._next],
            "request that is refused restores": [] if self.refused is None else [self.refused],
        }
