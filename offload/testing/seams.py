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


def _no_engines(*arguments: object) -> list[Place]:
    """Whoever wants to read from other engines says so with a place."""
    return []


def _no_listener(*arguments: object) -> None:
    """Engines of the testing kit have no port, unless a test gives them one."""


@contextmanager
def seams(
    places: Sequence[Place] = PLACES,
    join: Join = join_replicas,
    *,
    make_listener: Callable[..., Any] | None = None,
    engine_places: Callable[..., list[Place]] = _no_engines,
    **instead: Any,
) -> Iterator[None]:
    """Connectors made in this context have these places, replicas and ``offload.worker.side.Seams``.

    Not for several threads.
    """
    ours = CpuOffloadConnector
    before = (
        ours.seams,
        ours.places,
        ours.join_replicas,
        ours.make_operator,
        ours.engine_places,
        ours.make_listener,
    )
    ours.engine_places = staticmethod(engine_places)
    listener: Any = make_listener or _no_listener
    ours.make_listener = staticmethod(listener)
    ours.make_operator = staticmethod(_no_operator)
    ours.seams, ours.places = before[0]._replace(**instead), tuple(places)
    ours.join_replicas = staticmethod(join)  # type: ignore[arg-type]
    try:
        yield
    finally:
        ours.seams, ours.places = before[:2]
        ours.join_replicas = staticmethod(before[2])
        ours.make_operator = before[3]
        ours.engine_places = staticmethod(before[4])
        ours.make_listener = staticmethod(before[5])


def _no_operator(*arguments: object) -> None:
    """Engines of the testing kit have no operator socket."""
