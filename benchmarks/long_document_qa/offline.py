"""The offline benchmark: one fresh engine per mode, one mode after another or side by side."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack

from tqdm import tqdm

from benchmarks.long_document_qa.engine_process import EngineProcess
from benchmarks.long_document_qa.measure import measure
from benchmarks.long_document_qa.settings import Settings
from benchmarks.long_document_qa.summary import Row

__all__ = ["Start", "run_mode", "run_side_by_side"]


def run_mode(settings: Settings, mode: str) -> list[Row]:
    """Measure one mode; returns one row per document count and pass. EngineError if it fails.

    All caches are dropped before each document count, and its documents are new.
    """
    rows: list[Row] = []
    start = Start([mode])
    with EngineProcess(settings, mode, on_wait=start.tell) as engine:
        start.ended()
        _warm_up(settings, engine)
        for documents in settings.workload.documents:
            rows += _ask(settings, engine, documents)
    return rows


def run_side_by_side(settings: Settings, modes: Sequence[str]) -> Iterator[list[Row]]:
    """Measure modes document count by document count; yields rows per count. EngineError if one fails.

    The engines of all modes start at the same time; afterwards one of them works, and the others wait.
    """
    start = Start(modes)
    engines = [EngineProcess(settings, mode, on_wait=start.tell) for mode in modes]
    with ExitStack() as stack:
        for engine in engines:
            engine.begin()
            stack.push(engine)
        for engine in engines:
            engine.wait()
        start.ended()
        for engine in engines:
            _warm_up(settings, engine)
        for documents in settings.workload.documents:
            yield [row for engine in engines for row in _ask(settings, engine, documents)]


def _warm_up(settings: Settings, engine: EngineProcess) -> None:
    with _bar(engine, f"{engine.mode:8} warm-up", 2 * settings.warm_up_documents):
        engine.warm_up()


def _ask(settings: Settings, engine: EngineProcess, documents: int) -> list[Row]:
    workload = settings.workload
    engine.reset()
    with _bar(engine, f"{engine.mode:8} {documents} documents", documents * workload.passes):
        return measure(engine.run_round, workload, documents, engine.mode)


def _bar(engine: EngineProcess, name: str, num_requests: int) -> tqdm[None]:
    bar: tqdm[None] = tqdm(total=num_requests, unit="request", desc=name, dynamic_ncols=True)
    engine.on_done = bar.update
    return bar


class Start:
    """Says that engines are starting, and for how long: in one line on a terminal, else in two."""

    def __init__(self, modes: Sequence[str]) -> None:
        engines = "an engine" if len(modes) == 1 else f"{len(modes)} engines"
        self._text = f"starting {engines} ({', '.join(modes)})"
        self._began = time.monotonic()
        print(f"{self._text} ...", end="" if sys.stderr.isatty() else "\n", file=sys.stderr, flush=True)

    def tell(self) -> None:
        """Called about once a second."""
        if sys.stderr.isatty():
            print(f"\r{self._line()} ...", end="", file=sys.stderr, flush=True)

    def ended(self) -> None:
        """All have started."""
        print(f"{chr(13) if sys.stderr.isatty() else ''}{self._line()}: done", file=sys.stderr, flush=True)

    def _line(self) -> str:
        return f"{self._text}, {time.monotonic() - self._began:.0f} s"
