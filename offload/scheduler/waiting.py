"""Requests that were given a restore and have not gone on, and who must leave them GPU blocks."""

from collections.abc import Set as AbstractSet
from typing import NamedTuple

from offload.scheduler.engine import Engine, Request, State


class _Waiter(NamedTuple):
    """A request that was given a restore, and GPU blocks that it may need when it goes on."""

    request: Request
    num_needed: int


class Waiting:
    """Who waits for a restore, or for the step after it, and holds GPU blocks meanwhile.

    vLLM takes the blocks of a request away when its restore has failed, and looks at it first when it gives
    out blocks. If there are too few it looks at none behind it, though these may be the ones that have them,
    and wait for nothing else. So it lets them pass while blocks are short, and no restore begins then.
    """

    def __init__(self, engine: Engine, step_tokens: int) -> None:
        """Begin with none. ``step_tokens``: tokens that a step computes at most."""
        self._engine = engine
        self._groups = engine.groups
        self._step_tokens = step_tokens
        self._waiters: dict[str, _Waiter] = {}
        self._num_needed = 0  # by these
        self._lets_pass: set[str] = set()  # requests whose restores failed

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
        self._lets_pass.discard(request_id)
        waiter = self._waiters.pop(request_id, None) if self._waiters else None
        if waiter is None:
            return False
        self._num_needed -= waiter.num_needed
        return True

    def need(self, num_blocks: int) -> bool:
        """Whether a restore of so many GPU blocks would take what others need to go on."""
        if self._lets_pass:
            return True
        # vLLM reserves too few for windows, and each would wait for what the other has.
        return self._num_needed > 0 and num_blocks + self._num_needed > self._engine.num_free

    def must_let_pass(self, request: Request) -> bool:
        """Whether one whose restore has failed may lack GPU blocks that some who wait hold."""
        self.went_on(request.request_id)  # its restore has ended
        num_tokens = request.num_tokens + self._groups.position_tokens  # drafts too
        is_short = self._engine.num_free < self._groups.most_blocks(num_tokens, num_tokens)
        waiters = self._waiters.values()
        if not is_short or not any(
            self._engine.state(each.request) is State.WAITS_FOR_KV for each in waiters
        ):
            return False
        self._lets_pass.add(request.request_id)
        return True

    def check_invariants(self) -> None:
        """What the waiters need is what was summed up."""
        num_needed = sum(each.num_needed for each in self._waiters.values())
        assert self._num_needed == num_needed, f"{num_needed} are needed, {self._num_needed} counted"

    def left_over(self) -> dict[str, object]:
        """What has not ended, by name. For tests."""
        return {
            "requests that were restored": list(self._waiters),
            "requests that let pass": list(self._lets_pass),
        }
