"""What connectors that are made meanwhile use in the place of the real thing."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from offload.vllm.connector import CpuOffloadConnector


@contextmanager
def seams(**instead: Any) -> Iterator[None]:
    """Connectors made in this context have these ``offload.worker.side.Seams``. Not for several threads."""
    before = CpuOffloadConnector.seams
    CpuOffloadConnector.seams = before._replace(**instead)
    try:
        yield
    finally:
        CpuOffloadConnector.seams = before
