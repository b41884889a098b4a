"""What connectors that are made meanwhile use in the place of the real thing."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from offload.vllm.connector import CpuOffloadConnector
from offload.vllm.places import PLACES, Place
from offload.vllm.replicas import Shape, join_replicas
from offload.worker.replicas import Replicas

Join = Callable[[Shape], Replicas | None]
"""Finds the ranks that hold the KV of the one which asks."""


@contextmanager
def seams(places: Sequence[Place] = PLACES, join: Join = join_replicas, **instead: Any) -> Iterator[None]:
    """Connectors made in this context have these places, replicas and ``offload.worker.side.Seams``.

    Not for several threads.
    """
    ours = CpuOffloadConnector
    before = ours.seams, ours.places, ours.join_replicas, ours.make_operator, ours.sibling_places
    listener = ours.make_listener
    ours.make_listener = staticmethod(_no_listener)  # type: ignore[arg-type]
    ours.sibling_places = staticmethod(_no_siblings)  # type: ignore[arg-type]
    ours.make_operator = staticmethod(_no_operator)
    ours.seams, ours.places = before[0]._replace(**instead), tuple(places)
    ours.join_replicas = staticmethod(join)  # type: ignore[arg-type]
    try:
        yield
    finally:
        ours.seams, ours.places = before[:2]
        ours.join_replicas = staticmethod(before[2])
        ours.make_operator = before[3]
        ours.sibling_places = staticmethod(before[4])
        ours.make_listener = staticmethod(listener)


def _no_siblings(*arguments: object) -> list[Place]:
    """Whoever wants to read from siblings says so with a place."""
    return []


def _no_operator(*arguments: object) -> None:
    """Engines of the testing kit have no operator socket."""


def _no_listener(*arguments: object) -> None:
    """Nobody can fetch from engines of the testing kit, whatever they hand off."""
