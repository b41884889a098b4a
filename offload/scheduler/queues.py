"""How busy a link and a GPU are, in seconds, and how long requests took of late."""

from collections.abc import Callable
from typing import NamedTuple

from offload.scheduler.costs import LinkCost, PrefillCost
from offload.scheduler.engine import Request

_HALF_MINUTE = 30.0
_SHARE = 1 / 16
"""Weight of the latest request in what requests compute in the mean."""


class LinkQueue:
    """Seconds until a link is free, of jobs that go one after the other."""

    def __init__(self, cost: LinkCost | None, clock: Callable[[], float]) -> None:
        """Nothing is on it. ``cost``: of its jobs; None: nobody asks for seconds. ``clock`` in seconds."""
        self._cost = cost
        self._clock = clock
        self._num_bytes = 0
        self._seconds = 0.0
        self._at = clock()

    @property
    def seconds(self) -> float:
        """Until it is free, as far as is known. What has ended since the last report still counts."""
        return max(0.0, self._seconds - (self._clock() - self._at))

    def begin(self, num_bytes: int) -> None:
        """So many more are to be moved."""
        self._num_bytes += num_bytes
        if self._cost is not None:
            self._set(self.seconds + self._cost.seconds(num_bytes))

    def end(self, num_bytes: int) -> None:
        """So many of these are over."""
        self._num_bytes -= num_bytes
        if self._cost is not None:
            left = self._cost.seconds(self._num_bytes) if self._num_bytes else 0.0
            self._set(min(self.seconds, left))

    def check_invariants(self, num_bytes: int) -> None:
        """So many bytes are on it."""
        assert self._num_bytes == num_bytes, f"{num_bytes} bytes are moved, {self._num_bytes} counted"
        assert self._num_bytes or not self._seconds, f"nothing moves, and it takes {self._seconds} s"

    def _set(self, seconds: float) -> None:
        self._seconds, self._at = seconds, self._clock()


class Longest:
    """The most of what was noted in the last half to whole minute."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """Nothing was noted. ``clock`` in seconds."""
        self._clock = clock
        self._since = clock()
        self._now = self._before = 0.0

    def note(self, seconds: float) -> None:
        """So long takes a request."""
        self._turn()
        self._now = max(self._now, seconds)

    @property
    def seconds(self) -> float:
        """The most; 0 if nothing was noted."""
        self._turn()
        return max(self._now, self._before)

    def _turn(self) -> None:
        passed = self._clock() - self._since
        if passed >= _HALF_MINUTE:
            self._before = self._now if passed < 2 * _HALF_MINUTE else 0.0
            self._now, self._since = 0.0, self._clock()


class _Waiter(NamedTuple):
    """A request that has come: its tokens, and when."""

    num_tokens: int
    since: float


class GpuQueue:
    """Requests that are yet to be computed, and the seconds that this takes.

    A request waits from ``arrived`` to ``admitted``, where it is known what it computes; until then it is
    taken to compute such a part of its tokens as others do. It is over with ``finish``. One that was
    preempted in its answer is not known until it is admitted again.
    """

    def __init__(self, prefill: PrefillCost, clock: Callable[[], float]) -> None:
        """Nobody is there. ``prefill``: what tokens cost. ``clock`` in seconds."""
        self._prefill = prefill
        self._clock = clock
        self._waiting: dict[str, _Waiter] = {}
        self._num_tokens = 0  # of these
        self._held: set[str] = set()  # of these, in this step
        self._held_tokens = 0
        self._computing: dict[str, Request] = {}
        self._share = 1.0  # of its tokens that a request computes, in the mean

    def arrived(self, request: Request) -> None:
        """It waits for its turn."""
        self.finish(request.request_id)
        self._waiting[request.request_id] = _Waiter(request.num_tokens, self._clock())
        self._num_tokens += request.num_tokens

    def admitted(self, request: Request, num_there: int) -> None:
        """It was given blocks, and has so many leading tokens or waits for them."""
        if self._leave(request.request_id):
            computes = 1 - num_there / max(request.num_tokens, 1)
            self._share += (min(max(computes, 0.0), 1.0) - self._share) * _SHARE

    def held(self, request_id: str) -> None:
        """It waits for a link: until ``end_step`` it is not in the backlog of others."""
        if request_id in self._waiting and request_id not in self._held:
            self._held.add(request_id)
            self._held_tokens += self._waiting[request_id].num_tokens

    def end_step(self) -> None:
        """All who wait are asked again."""
        self._held.clear()
        self._held_tokens = 0

    def goes_on(self, request: Request) -> None:
        """It is computed from now on, or from the next step on."""
        self._computing[request.request_id] = request

    def finish(self, request_id: str) -> None:
        """It is over."""
        self._leave(request_id)
        self._computing.pop(request_id, None)

    def waited(self, request_id: str) -> float:
        """Seconds that it has waited for its turn; 0 if it does not."""
        waiter = self._waiting.get(request_id)
        return 0.0 if waiter is None else self._clock() - waiter.since

    def backlog(self, but: str) -> float:
        """Seconds of prefill of all that wait or are computed.

        Without that request, and without those held in this step. O(those that are computed).
        """
        seconds = 0.0
        num_others, num_tokens = len(self._waiting) - len(self._held), self._num_tokens - self._held_tokens
        if but in self._waiting and but not in self._held:
            num_others, num_tokens = num_others - 1, num_tokens - self._waiting[but].num_tokens
        if num_others:
            each = num_tokens / num_others
            seconds = num_others * self._prefill.seconds(int(each * (1 - self._share)), int(each))
        return seconds + self.computing()

    def computing(self) -> float:
        """Seconds of prefill of all that are computed. O(those).

        All are looked at that were computing when this was asked last, or have begun since.
        """
        seconds = 0.0
        for request_id, request in list(self._computing.items()):
            first, stop = request.num_computed_tokens, request.num_tokens
            if first + 1 >= stop:  # it decodes
                del self._computing[request_id]
            else:
                seconds += self._prefill.seconds(first, stop)
        return seconds

    @property
    def num_waiting(self) -> int:
        """Who waits for its turn."""
        return len(self._waiting)

    @property
    def num_computing(self) -> int:
        """Who is computed, or was when these were last looked at."""
        return len(self._computing)

    @property
    def num_held(self) -> int:
        """Who waits for a link, of those asked in this step."""
        return len(self._held)

    def check_invariants(self) -> None:
        """What waits was summed up."""
        total = sum(waiter.num_tokens for waiter in self._waiting.values())
        assert total == self._num_tokens, f"{total} tokens wait, {self._num_tokens} counted"
        twice = self._waiting.keys() & self._computing.keys()
        assert not twice, f"{twice} wait, and are computed"
        held = sum(self._waiting[each].num_tokens for each in self._held)
        assert held == self._held_tokens, f"{held} tokens are held, {self._held_tokens} counted"
        assert 0 <= self._share <= 1, f"requests compute {self._share} of their tokens"

    def left_over(self) -> list[str]:
        """Who has not ended. For tests."""
        return [*self._waiting, *self._computing]

    def _leave(self, request_id: str) -> bool:
        waiter = self._waiting.pop(request_id, None)
        if waiter is not None:
            self._num_tokens -= waiter.num_tokens
            if request_id in self._held:
                self._held.remove(request_id)
                self._held_tokens -= waiter.num_tokens
        return waiter is not None
