"""Requests with much to compute step aside for those whose KV has arrived, so that these decode at once."""

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, islice
from math import inf
from operator import itemgetter, neg
from typing import NamedTuple

from offload.scheduler.choices import Choices
from offload.scheduler.common import Common
from offload.scheduler.engine import Request
from offload.scheduler.offer import Offer, Why

_AT_MOST = 1 / 4
"""Of the time that computing takes: that a request steps aside while restores of others are under way."""
_A_STEP = 1 / 2
"""Of that: what a step takes of it, however long it was. What landed in it could not go on before its end."""
_WITH_IT = 1 / 16
"""Of the time that computing takes: who comes so soon after it was first asked has come with it."""
_MOST_SECONDS = 30.0
"""That computing is believed to take: what was measured may have a pause of the engine in it."""
_FEWER = 8
"""Whom it lets pass has to compute so many times fewer tokens."""
_STEPS = 2
"""Of others that it leaves to them when their restores have landed, once that time is over."""
_FEW = 64
"""Tokens that make no step long, and neither does an eighth of those that a step computes at most."""
_NEW = 16
"""Requests that were not asked yet, and are looked at."""


class _Place(NamedTuple):
    """Where a request is among others.

    Attributes:
        priority: vLLM's; less is sooner.
        came: by the clock.
    """

    priority: int
    came: float


@dataclass(slots=True)
class _Turn:
    """A request that has, or had, reason to step aside.

    Attributes:
        last: it lets nobody pass who is behind that.
        most: tokens that others may have to compute for it to let them pass.
        patience: seconds that it waits for their restores.
        asked_at: when it was asked, and counted from what is left.
        left: seconds of its patience.
        num_left: steps that it may leave to them after that.
    """

    last: _Place
    most: int
    patience: float
    asked_at: float
    left: float
    num_left: int = _STEPS

    def is_patient(self, now: float) -> bool:
        """Whether it waits for restores. It is asked, and a long step ends at most half of its patience."""
        self.left -= min(now - self.asked_at, _A_STEP * self.patience)
        self.asked_at = now
        return self.left > 0


class _Least:
    """The least of some requests' numbers, among those up to some place.

    Sorted by place. ``_leasts`` has the least number up to each, so it never rises.
    """

    def __init__(self) -> None:
        self._numbers: dict[str, tuple[_Place, int]] = {}
        self._sorted: list[tuple[_Place, int]] = []
        self._leasts: list[int] = []

    def put(self, request_id: str, place: _Place, number: int) -> None:
        """O(log n), moving what is behind it, and O(1) for each of which it is the least now."""
        self.pop(request_id)
        self._numbers[request_id] = entry = (place, number)
        index = bisect_right(self._sorted, entry)
        self._sorted.insert(index, entry)
        least = min(number, self._leasts[index - 1]) if index else number
        stop = bisect_left(self._leasts, -least, index, key=neg)
        self._leasts[index:stop] = [least] * (stop - index + 1)

    def pop(self, request_id: str) -> tuple[_Place, int] | None:
        """O(log n), moving what is behind it, and O(1) for each of which it was the least."""
        found = self._numbers.pop(request_id, None) if self._numbers else None
        if found is not None:
            index = bisect_left(self._sorted, found)
            del self._sorted[index], self._leasts[index]
            for at in range(index, len(self._sorted)):
                number = self._sorted[at][1]
                least = min(number, self._leasts[at - 1]) if at else number
                if self._leasts[at] == least:
                    break
                self._leasts[at] = least
        return found

    def clear(self) -> None:
        if self._numbers:
            self._numbers.clear()
            self._sorted.clear()
            self._leasts.clear()

    def names(self) -> list[str]:
        return list(self._numbers)

    def least(self, last: _Place) -> float:
        """Infinite if there is none. O(log n)."""
        num_up_to = bisect_right(self._sorted, last, key=itemgetter(0))
        return self._leasts[num_up_to - 1] if num_up_to else inf

    def check_invariants(self) -> None:
        """What is kept sorted is what there is."""
        assert self._sorted == sorted(self._numbers.values()), f"{self._sorted}, not {self._numbers}"
        leasts = list(accumulate((number for _, number in self._sorted), min))
        assert self._leasts == leasts, f"{self._leasts}, not {leasts}"


class Aside:
    """Who lets others pass, whose first tokens would wait for its prefill.

    All requests of a step have their tokens when its largest prefill has ended. So one that lacks much, and
    is asked in a step, is told to ask again in the next one

    - while restores are under way of others that lack little: for a quarter of the time at most that it takes
      to compute what it lacks, of which a step, however long, takes a half;
    - in a step in which such others go on, for they have it for themselves: after that time in two at most;
    - when it is first asked, while such others wait behind it, and the pool has their KV: what a restore may
      pay for, or what the GPU has as well. If no restore pays for that, who was preempted, or has waited for
      longer than computing takes, lets nobody pass: the last first tokens would come later still.

    Nobody steps aside for who is behind it by vLLM's priority, or who came later than with it, or a second
    time before it was admitted. So where restores never end, each prompt waits for those of a moment only.
    What was admitted runs, and vLLM divides a step's tokens among those that run.
    """

    def __init__(self, common: Common, choices: Choices, step_tokens: int) -> None:
        """Nobody is known. ``choices``: of restores. ``step_tokens``: a step computes at most."""
        self._common = common
        self._choices = choices
        self._least_tokens = max(_FEW, step_tokens // 8)
        self._new: dict[str, Request] = {}  # have not been asked
        self._came: dict[str, float] = {}  # by the clock, those that were not admitted
        self._restored = _Least()  # tokens that are left to compute, of those whose restores are under way
        self._going = _Least()  # the same of those that have gone on in this step
        self._turns: dict[str, _Turn] = {}

    def arrived(self, request: Request) -> None:
        """It waits, and will be asked."""
        self._new[request.request_id] = request
        self._came[request.request_id] = self._common.clock()

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
        seconds = min(self._common.costs.prefill.expected(num_there, request.num_tokens), _MOST_SECONDS)
        patience, now = _AT_MOST * seconds, self._common.clock()
        last = _Place(request.priority, now + _WITH_IT * seconds)
        turn = _Turn(last, num_missing // _FEWER, patience, now, patience)
        self._turns[request.request_id] = turn
        if self._lets_pass(turn):
            return True
        is_late = now - self._came.get(request.request_id, -inf) > seconds
        behind = [each for each in islice(self._new.values(), _NEW) if each.priority <= turn.last.priority]
        return any(self._may_pass(each, turn, is_late=is_late) for each in behind)

    def admitted(self, request: Request, num_local: int, num_external: int, *, has_waited: bool) -> None:
        """It has blocks: so many tokens behind those that the GPU has are restored, or it goes on.

        ``has_waited``: for a restore, which has ended.
        """
        request_id = request.request_id
        self._turns.pop(request_id, None)
        self._new.pop(request_id, None)
        came = self._came.pop(request_id, -inf)
        restored = self._restored.pop(request_id)
        if num_external:
            num_missing = request.num_tokens - num_local - num_external
            self._restored.put(request_id, _Place(request.priority, came), num_missing)
        elif has_waited and restored is not None:
            self._going.put(request_id, *restored)

    def failed(self, request_id: str) -> None:
        """Its restore has fallen short: it lacks more than was thought."""
        self._restored.pop(request_id)

    def finish(self, request_id: str) -> None:
        """It is over."""
        self._turns.pop(request_id, None)
        self._new.pop(request_id, None)
        self._came.pop(request_id, None)
        self._restored.pop(request_id)

    @property
    def has_waiting(self) -> bool:
        """Whether a request has come, and has no blocks yet."""
        return bool(self._came)

    def end_step(self) -> None:
        """All who could be admitted in a step were asked."""
        self._going.clear()

    def check_invariants(self) -> None:
        """Nobody is at two places, and nobody steps aside for ever."""
        assert not self._going.names(), f"{self._going.names()} went on in an earlier step"
        self._restored.check_invariants()
        self._going.check_invariants()
        turns = self._turns.values()
        assert all(turn.left <= turn.patience < inf and 0 <= turn.num_left <= _STEPS for turn in turns)
        twice = self._new.keys() & {*self._turns, *self._restored.names()}
        assert not twice, f"{twice} were asked, and were not"
        assert self._new.keys() <= self._came.keys(), f"of {list(self._new)} some never came"

    def left_over(self) -> Sequence[str]:
        """Who has not ended. For tests."""
        return [*self._new, *self._came, *self._restored.names(), *self._turns]

    # Private

    def _may_pass(self, request: Request, turn: _Turn, *, is_late: bool) -> bool:
        """Whether it has to compute few tokens, by what the pool knows. O(log n).

        Who ``is_late`` lets it pass only if the pool would bring back what the GPU may evict meanwhile. With
        bags the GPU may lack the state behind what it has, so there only a restore counts.
        """
        engine, size = self._common.engine, self._common.block_size
        chain = engine.chain(request)
        num_there = self._common.allocator.hollow.depth(chain) * size
        if request.num_tokens - num_there > turn.most:
            return False
        num_local = 0
        if not engine.groups.has_bags:
            num_local = bisect_left(chain, True, key=lambda prefix_hash: not engine.has(prefix_hash)) * size
        if request.num_tokens - num_local <= turn.most:
            return not is_late or self._choices.may_restore(0, num_there)
        return self._choices.may_restore(num_local, num_there)

    def _lets_pass(self, turn: _Turn) -> bool:
        is_patient = turn.is_patient(self._common.clock())
        if self._going.least(turn.last) <= turn.most and (is_patient or turn.num_left):
            turn.num_left -= not is_patient
            return True
        return is_patient and self._restored.least(turn.last) <= turn.most
