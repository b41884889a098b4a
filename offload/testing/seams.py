"""What connectors that are made meanwhile use in the place of the real thing."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from offload.vllm.connector import CpuOffloadConnector
from offload.vllm.places import PLACES, Place


@contextmanager
def seams(places: Sequence[Place] = PLACES, **instead: Any) -> Iterator[None]:
    """Connectors made in this context have these places and ``offload.worker.side.Seams``.

    Not for several threads.
    """
    before = CpuOffloadConnector.seams, CpuOffloadConnector.places
    CpuOffloadConnector.seams = before[0]._replace(**instead)
    CpuOffloadConnector.places = tuple(places)
    try:
        yield
    finally:
        CpuOffloadConnector.seams, CpuOffloadConnector.places = before
