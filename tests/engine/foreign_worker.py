"""What a worker of another installation looks like: importing this changes the workers of this process."""

from typing import Any

from offload.vllm import connector
from offload.worker.side import WorkerSide
from tests.engine.worker_probe import WorkerProbe


class ForeignWorker(WorkerProbe):
    """Its connector has another cache layout; the scheduler's has not."""


def _foreign_side(cache: Any, cpu_bytes: int, fingerprint: Any, *rest: Any) -> WorkerSide:
    return WorkerSide(cache, cpu_bytes, fingerprint._replace(layout="inside out"), *rest)


connector.WorkerSide = _foreign_side
