"""A worker whose copies take as long as over a link of a given pace: vLLM's `worker_extension_cls`."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from offload.testing.copiers.paced import Link, Pace, PacedCopier, RealClock
from offload.vllm.connector import CpuOffloadConnector
from offload.worker.copiers import Copier

__all__ = ["PACE", "PacedWorker", "write_pace"]

PACE = "KV_OFFLOAD_BENCHMARK_PACE"
"""Environment variable: a file with the pace of copies, read at every copy."""


class PacedWorker:
    """Mixed into vLLM's worker class; that it is imported there is what counts."""


def write_pace(file: Path, pace: Pace) -> None:
    """Copies from now on take that long. A reader sees the old pace or the new one."""
    scratch = file.with_suffix(".new")
    scratch.write_text(f"{pace.bytes_per_second} {pace.seconds}")
    scratch.rename(file)


def _read_pace(file: Path) -> Pace:
    return Pace(*map(float, file.read_text().split()))


def _use_pace_of(file: Path) -> None:
    seams = CpuOffloadConnector.seams

    def make_paced(*arguments: Any) -> Copier:
        return PacedCopier(Link(RealClock(), lambda: _read_pace(file)), seams.make_copier(*arguments))

    CpuOffloadConnector.seams = seams._replace(make_copier=make_paced)


if name := os.environ.get(PACE):
    _use_pace_of(Path(name))
