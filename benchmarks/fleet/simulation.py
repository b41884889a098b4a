"""What happens in a fleet, in order: requests come, go to engines, are computed one by one, and end."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Sequence
from typing import Protocol

from allocator import Event
from benchmarks.fleet.engines import SECONDS_PER_TOKEN, Asked, FleetEngine
from benchmarks.trace_replay.replay import TraceClock

__all__ = ["Chooser", "Simulation"]


class Chooser(Protocol):
    """What gives requests to engines: the proxy's policy, and what the proxy keeps for it."""

    async def choose(self, asked: Asked) -> int:
        """The number of the engine for a request that has come."""

    def began(self, asked: Asked, engine: int) -> None:
        """Its first token has come."""

    def ended(self, asked: Asked, engine: int) -> None:
        """Its answer is complete."""

    def told(self, engine: int, events: Sequence[Event]) -> None:
        """What an engine has published of its pool."""


class Simulation:
    """Engines, and the requests that they are given.

    Args:
        engines: all of them.
        chooser: whom a request goes to.
        clock: that everybody reads.
        events_after: seconds from a change of a pool to when the chooser is told.
    """

    def __init__(
        self, engines: Sequence[FleetEngine], chooser: Chooser, clock: TraceClock, events_after: float
    ) -> None:
        self._engines, self._chooser, self._clock = engines, chooser, clock
        self._events_after = events_after
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = itertools.count()

    async def run(self, requests: Sequence[Asked]) -> None:
        """Until all are answered. ``requests``: by time of arrival; each is told what became of it."""
        for asked in requests:
            self._until(asked.arrived_at)
            self._clock.seconds = asked.arrived_at
            number = await self._chooser.choose(asked)
            engine = self._engines[number]
            engine.num_requests += 1
            engine.waiting.append(asked)
            if not engine.is_busy:
                self._begin(number)
        self._until(float("inf"))

    def _begin(self, number: int) -> None:
        engine = self._engines[number]
        asked = engine.waiting.popleft()
        self._after(engine.begin(asked), lambda: self._end(number, asked))

    def _end(self, number: int, asked: Asked) -> None:
        engine = self._engines[number]
        asked.first_at = self._clock.seconds
        self._chooser.began(asked, number)
        if events := engine.end(asked):
            self._after(self._events_after, lambda: self._chooser.told(number, events))
        self._after(asked.num_output * SECONDS_PER_TOKEN, lambda: self._chooser.ended(asked, number))
        if engine.waiting:
            self._begin(number)

    def _after(self, seconds: float, what: Callable[[], None]) -> None:
        heapq.heappush(self._events, (self._clock.seconds + seconds, next(self._count), what))

    def _until(self, seconds: float) -> None:
        while self._events and self._events[0][0] <= seconds:
            self._clock.seconds, _, what = heapq.heappop(self._events)
            what()
