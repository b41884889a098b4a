"""Requests with much to compute step aside for those whose KV has arrived, so that these decode at once."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from math import inf

from offload.scheduler.common import Common
from offload.scheduler.engine import Request
from offload.scheduler.offer import Offer, Why

_AT_MOST = 1 / 4
"""Of the time that computing takes: that a request steps aside while restores of others are under way."""
_FEWER = 8
"""Whom it lets pass has to compute so many times fewer tokens."""
_STEPS = 2
"""Of others that it leaves to them when their restores have landed."""
_FEW = 64
"""Tokens that make no step long, and neither does an eighth of those that a step computes at most."""
_NEW = 16
"""Requests that were not asked yet, and are looked at."""


@dataclass(slots=True)
class _Turn:
    """A request that has, or had, reason to step aside.

    Attributes:
        priority: vLLM's; less is sooner.
        most: tokens that others may have to compute for it to let them pass.
        until: it waits for their restores no longer than that.
        num_left: steps that it may leave to them.
    """

    priority: int
    most: int
    until: float
    num_left: int = _STEPS


class _Least:
    """The least of some requests' numbers, among those of at most some priority."""

    def __init__(self) -> None:
        self._numbers: dict[str, tuple[int, int]] = {}
        self._sorted: tuple[list[int], list[int]] | None = None  # priorities, and the least up to each

    def put(self, request_id: str, priority: int, number: int) -> None:
        self._numbers[request_id] = (priority, number)
        self._sorted = None

    def pop(self, request_id: str) -> tuple[int, int] | None:
        found = self._numbers.pop(request_id, None) if self._numbers else None
        if found is not None:
            self._sorted = None
        return found

    def clear(self) -> None:
        if self._numbers:
            self._numbers.clear()
            self._sorted = None

    def names(self) -> list[str]:
        return list(self._numbers)

    def least(self, priority: int) -> float:
        """Infinite if there is none. O(log n); after a change O(n log n), once."""
        if not self._numbers:
            return inf
        if self._sorted is None:
            priorities, leasts = list[int](), list[int]()
            for each, number in sorted(self._numbers.values()):
                priorities.append(each)
                leasts.append(min(number, leasts[-1]) if leasts else number)
            self._sorted = priorities, leasts
        place = bisect_right(self._sorted[0], priority)
        return self._sorted[1][place - 1] if place else inf


class Aside:
    """Who lets others pass, whose first tokens would wait for its prefill.

    All requests of a step have their tokens when its largest prefill has ended. So one that lacks much, and
    is asked in a step, is told to ask again in the next one

    - while restores are under way of others that lack little: for a quarter of the time at most that it takes
      to compute what it lacks;
    - in a step in which such others go on, for they have it for themselves: in two steps at most;
    - when it is first asked, while such others wait behind it, and the pool has their KV.

    Nobody steps aside for who is behind it by vLLM's priority, or a second time before it was admitted. What
    was admitted runs, and vLLM divides a step's tokens among those that run.
    """

    def __init__(self, common: Common, step_tokens: int) -> None:
        """Nobody is known. ``step_tokens``: a step computes at most."""
        self._common = common
        self._least_tokens = max(_FEW, step_tokens // 8)
        self._new: dict[str, Request] = {}  # have not been asked
        self._restored = _Least()  # tokens that are left to compute, of those whose restores are under way
        self._going = _Least()  # the same of those that have gone on in this step
        self._turns: dict[str, _Turn] = {}

    def arrived(self, request: Request) -> None:
        """It waits, and will be asked."""
        self._new[request.request_id] = request

    def asked(self, request_id: str) -> bool:
        """It is asked whether it may be admitted. Returns whether it steps aside, as it did before."""
        self._new.pop(request_id, None)
        self._restored.pop(request_id)
        turn = self._turns.get(request_id)
        return turn is not None and self._lets_pass(turn)

    def must(self, request: Request, num_local: int, offer: Offer) -> bool:
        """Whether it steps aside. It was asked, and would compute what is behind these tokens.

        With checkpoints, who is restored or has failed to be may have GPU blocks kept for it: it goes on.

        O(log n), and O(log n) for each of a few that are behind it, when it is first asked.
        """
        assert offer.tokens is not None, "it has to wait anyway"
        num_there = num_local + offer.tokens
        num_missing = request.num_tokens - num_there
        if request.request_id in self._turns or num_missing <= self._least_tokens:
            return False
        if self._common.engine.groups.has_bags and offer.why is not Why.ABSENT:
            return False
        seconds = self._common.costs.prefill.expected(num_there, request.num_tokens)
        until = self._common.clock() + _AT_MOST * seconds
        turn = _Turn(request.priority, num_missing // _FEWER, until)
        self._turns[request.request_id] = turn
        if self._lets_pass(turn):
            return True
        behind = islice(self._new.values(), _NEW)
        return any(each.priority <= turn.priority and self._lacks_little(each, turn) for each in behind)

    def admitted(self, request: Request, num_local: int, num_external: int, *, has_waited: bool) -> None:
        """It has blocks: so many tokens behind those that the GPU has are restored, or it goes on.

        ``has_waited``: for a restore, which has ended.
        """
        request_id = request.request_id
        self._turns.pop(request_id, None)
        self._new.pop(request_id, None)
        restored = self._restored.pop(request_id)
        if num_external:
            num_missing = request.num_tokens - num_local - num_external
            self._restored.put(request_id, request.priority, num_missing)
        elif has_waited and restored is not None:
            self._going.put(request_id, *restored)

    def failed(self, request_id: str) -> None:
        """Its restore has fallen short: it lacks more than was thought."""
        self._restored.pop(request_id)

    def finish(self, request_id: str) -> None:
        """It is over."""
        self._turns.pop(request_id, None)
        self._new.pop(request_id, None)
        self._restored.pop(request_id)

    def end_step(self) -> None:
        """All who could be admitted in a step were asked."""
        self._going.clear()

    def check_invariants(self) -> None:
        """Nobody is at two places, and nobody steps aside for ever."""
        assert not self._going.names(), f"{self._going.names()} went on in an earlier step"
        assert all(turn.until < inf and 0 <= turn.num_left <= _STEPS for turn in self._turns.values())
        twice = self._new.keys() & {*self._turns, *self._restored.names()}
        assert not twice, f"{twice} were asked, and were not"

    def left_over(self) -> Sequence[str]:
        """Who has not ended. For tests."""
        return [*self._new, *self._restored.names(), *self._turns]

    # Private

    def _lacks_little(self, request: Request, turn: _Turn) -> bool:
        depth = self._common.allocator.resident_depth(self._common.engine.chain(request))
        return request.num_tokens - depth * self._common.block_size <= turn.most

    def _lets_pass(self, turn: _Turn) -> bool:
        if turn.num_left and self._going.least(turn.priority) <= turn.most:
            turn.num_left -= 1
            return True
        return self._common.clock() < turn.until and self._restored.least(turn.priority) <= turn.most
