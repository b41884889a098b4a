"""The offline benchmark: one fresh engine per mode, all document counts one after another."""

from __future__ import annotations

from typing import Any

from tqdm import tqdm

from benchmarks.longdoc.engine_process import EngineProcess
from benchmarks.longdoc.measure import measure
from benchmarks.longdoc.settings import Settings

__all__ = ["run_mode"]


def run_mode(settings: Settings, mode: str) -> list[dict[str, Any]]:
    """Measure one mode; returns one row per document count and pass. EngineError if it fails.

    All caches are dropped before each document count, and its documents are new.
    """
    workload = settings.workload
    total = sum(workload.documents) * workload.passes + 2 * (settings.gpu_documents + 1)
    rows: list[dict[str, Any]] = []
    with (
        tqdm(total=total, unit="request", desc=f"{mode:8} start", dynamic_ncols=True) as bar,
        EngineProcess(settings, mode, on_done=bar.update) as engine,
    ):
        bar.set_description(f"{mode:8} warm-up")
        engine.warm_up()
        for documents in workload.documents:
            bar.set_description(f"{mode:8} {documents} documents")
            engine.reset()
            rows += measure(engine.run_round, workload, documents, mode)
    return rows
