"""Where virtual ranks that hold the same KV meet: on threads, while their caches are registered."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, Protocol

from offload.vllm.replicas import Shape
from offload.worker.replicas import Replicas

_SECONDS = 60.0


class Meeting:
    """The ranks of one pipeline stage, as vLLM's groups of processes bring them together."""

    def __init__(self, num_ranks: int, pcp: int) -> None:
        """``pcp``: ranks of prefill context parallelism among them."""
        self._num_tensor = num_ranks // pcp
        self._said: list[Any] = [None] * num_ranks
        self._barrier = threading.Barrier(num_ranks, timeout=_SECONDS)

    def join(self, place: int) -> Callable[[Shape], Replicas | None]:
        """In the place of ``join_replicas``, for the rank there."""

        def joined(shape: Shape) -> Replicas | None:
            if shape == Shape():
                return None
            members = shape.members_of(place % self._num_tensor, self._num_tensor)
            return Replicas(members, members.index(place), partial(self._exchange, place))

        return joined

    def _exchange(self, place: int, mine: Any) -> list[Any]:
        """Raises BrokenBarrierError if some rank does not come."""
        self._said[place] = mine
        self._barrier.wait()
        said = list(self._said)
        self._barrier.wait()  # nobody says the next thing before all have heard this
        return said


class Registers(Protocol):
    """A rank."""

    def register(self) -> None:
        """May wait for others to call it."""


class _Registering(threading.local):
    """Which rank this thread registers."""

    rank = 0


registering = _Registering()


def register(ranks: Sequence[Registers], shape: Shape) -> None:
    """Register the caches of all ranks: side by side where ranks hold the same KV, else one by one."""
    if shape == Shape():
        for rank in ranks:
            rank.register()
        return
    with ThreadPoolExecutor(len(ranks), "virtual-rank") as threads:
        for registered in [threads.submit(rank.register) for rank in ranks]:
            registered.result()
