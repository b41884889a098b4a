"""Requests that have begun, and what the pool's policy is told of how their answers end."""

import math
from collections.abc import Hashable, Iterator
from typing import NamedTuple

from allocator import CpuOffloadingBlockAllocator
from evictor import KeepHints
from evictor.endings import Endings
from offload.scheduler.engine import Engine, Request


class _Turn(NamedTuple):
    """Of a request that has begun.

    Attributes:
        number: its own in the pool.
        wish: what it asks for, as part of its ending.
        is_session: it rests whenever its client has sent nothing more.
    """

    number: int
    wish: Hashable
    is_session: bool


class Turns:
    """Requests that have been given blocks and are not over. All calls cost as ``touch`` of the allocator.

    An ending is what the engine says of it, together with what the request asked for: hints of its client
    may say that the chain comes back, such as a time to live. No time and no text of a client is part of it.
    """

    def __init__(self, allocator: CpuOffloadingBlockAllocator, engine: Engine) -> None:
        """No request has begun."""
        self._allocator = allocator
        self._engine = engine
        self._turns: dict[str, _Turn] = {}
        self._endings = Endings()
        self._num_sessions = 0  # of all turns

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._turns

    def __iter__(self) -> Iterator[str]:
        """Their ids."""
        return iter(self._turns)

    def __len__(self) -> int:
        return len(self._turns)

    @property
    def go_on(self) -> bool:
        """Whether the engine steps until one of them is over, unless it is paused. Sessions may rest."""
        return len(self._turns) > self._num_sessions

    def begin(self, request: Request, keep: KeepHints | None) -> None:
        """``request`` is admitted for the first time, and wants its KV kept so."""
        number = self._allocator.touch(self._engine.chain(request), keep)
        self._turns[request.request_id] = _Turn(number, _wish_of(keep), request.resumable)
        self._num_sessions += request.resumable

    def end(self, request: Request) -> int | None:
        """``request`` is over, in whatever state, and all that is to be stored of it now has been planned.

        What is planned before is told with the rest. What is stored later takes it from there. Returns the
        class of its ending; None: see ``ending``.
        """
        ending = self.ending(request)
        turn = self._turns.pop(request.request_id, None)
        self._num_sessions -= turn is not None and turn.is_session
        if turn is None or ending is None:
            return None
        number = self._endings.class_of(ending)
        self._allocator.ended(self._engine.chain(request), turn.number, number)
        return number

    def ending(self, request: Request) -> Hashable | None:
        """How the answer of ``request``, which is over, ended: equal where answers ended alike.

        None: it has not begun, there is no answer, or a fault ended it.
        """
        turn, ending = self._turns.get(request.request_id), self._engine.ending(request)
        return None if turn is None or ending is None else (ending, turn.wish)

    def check_invariants(self) -> None:
        """Classes of endings are bounded, and requests are known in the order in which they began."""
        self._endings.check_invariants()
        numbers = [turn.number for turn in self._turns.values()]
        assert numbers == sorted(numbers), f"turns {numbers} are out of order"
        num_sessions = sum(turn.is_session for turn in self._turns.values())
        assert num_sessions == self._num_sessions, f"{num_sessions} sessions, {self._num_sessions} counted"


def _wish_of(keep: KeepHints | None) -> Hashable:
    """What of a client's hints says how soon the chain comes back, without the times."""
    if keep is None:
        return None
    return keep.worth, keep.ttl < math.inf, keep.pinned_until > -math.inf
