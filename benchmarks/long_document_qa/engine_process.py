"""Runs an `Engine` in a fresh process and hands calls over, so that engines leave nothing behind."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import re
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import psutil

from benchmarks.long_document_qa.environment import set_environment
from benchmarks.long_document_qa.measure import RoundResult
from benchmarks.long_document_qa.settings import Settings
from benchmarks.long_document_qa.workload import Prompt

__all__ = ["EngineError", "EngineProcess"]

_LOG_TAIL_LINES = 12
_RAISED = re.compile(r"\b[A-Z]\w*(Error|Exception|Refused): \S")
_HARMLESS = re.compile(r"\b(WARNING|INFO)\b")
# An engine stopped by force leaves shared memory to Python's resource tracker, which frees it with a warning.
_QUIET = "ignore:resource_tracker:UserWarning"
_STOP_SECONDS = 60.0
_GRACE_SECONDS = 5.0


class EngineError(RuntimeError):
    """The engine did not start, or failed; the message shows the first exception in its log, and its end."""


def _make_engine(settings: Settings, mode: str) -> Any:
    from benchmarks.long_document_qa.engine import Engine

    return Engine(settings, mode)


class EngineProcess:
    """A context manager: an engine of one mode, started on entry and stopped on exit.

    To start several side by side, `begin` each, then `wait` for each; what is begun must be exited.

    Args:
        settings, mode: as for `Engine`.
        on_done: called in this process whenever the engine has answered a request.
        on_wait: called in this process, once a second, while the engine is starting.
        make: makes the engine there; a function of a module.

    The engine's output goes to the temporary file `log`, which is kept if anything fails.
    """

    def __init__(
        self,
        settings: Settings,
        mode: str,
        on_done: Callable[[], None] = lambda: None,
        on_wait: Callable[[], None] = lambda: None,
        make: Callable[[Settings, str], Any] = _make_engine,
    ) -> None:
        self.mode = mode
        handle, log = tempfile.mkstemp(prefix=f"kv-offload-{mode}-", suffix=".log")
        os.close(handle)
        self.log = Path(log)
        self.on_done = on_done
        self._on_wait = on_wait
        self._settings = settings
        context: Any = multiprocessing.get_context("forkserver" if settings.in_process else "spawn")
        if settings.in_process:
            context.set_forkserver_preload(["benchmarks.long_document_qa.imports"])
        self._connection, self._child_end = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(self._child_end, make, settings, mode, self.log), name=f"engine-{mode}"
        )

    @property
    def pid(self) -> int:
        """Process id of the front end; the engine's own processes are its descendants."""
        assert self._process.pid is not None
        return self._process.pid

    def begin(self) -> None:
        """Let it start, and return at once."""
        os.environ.setdefault("PYTHONWARNINGS", _QUIET)
        if self._settings.in_process:
            set_environment(self._settings)  # glibc reads its part of it when a process begins
        self._process.start()
        self._child_end.close()

    def wait(self) -> None:
        """Return once it has started. EngineError if it does not."""
        while not self._connection.poll(1.0):
            self._on_wait()
        self._receive()

    def __enter__(self) -> EngineProcess:
        self.begin()
        try:
            self.wait()
        except BaseException:
            self._stop(_GRACE_SECONDS)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Literal[False]:
        self._stop(_STOP_SECONDS if kind is None else _GRACE_SECONDS)
        if kind is None:
            self.log.unlink(missing_ok=True)
        return False

    def warm_up(self) -> None:
        """See `Engine.warm_up`."""
        self._call("warm_up")

    def reset(self) -> None:
        """See `Engine.reset`."""
        self._call("reset")

    def run_round(self, prompts: Sequence[Prompt]) -> RoundResult:
        """See `Engine.run_round`."""
        result = self._call("run_round", list(prompts))
        assert isinstance(result, RoundResult)
        return result

    def _stop(self, seconds: float) -> None:
        """Ask the child to stop, after that many seconds tell it to end; kill it and the engine at last.

        Returns when the engine's processes are gone too, and with them its memory on host and GPU.
        """
        engine: list[psutil.Process] = []
        with contextlib.suppress(psutil.NoSuchProcess):
            engine = psutil.Process(self.pid).children(recursive=True)
        with contextlib.suppress(OSError):
            self._connection.send(("stop", None))
        self._process.join(seconds)
        if self._process.is_alive():
            self._process.terminate()
            self._process.join(_GRACE_SECONDS)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()
        _, left = psutil.wait_procs(engine, timeout=_GRACE_SECONDS)
        for process in left:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(left, timeout=_GRACE_SECONDS)

    def _call(self, name: str, argument: Any = None) -> Any:
        try:
            self._connection.send((name, argument))
        except OSError as error:
            raise self._failure("its process has ended") from error
        return self._receive()

    def _receive(self) -> Any:
        """Wait for the answer to a call, passing progress on. EngineError if there is none."""
        while True:
            try:
                kind, value = self._connection.recv()
            except (EOFError, OSError) as error:
                raise self._failure("its process has ended") from error
            if kind == "done":
                self.on_done()
            elif kind == "result":
                return value
            else:
                raise self._failure(value)

    def _failure(self, reason: str) -> EngineError:
        lines: list[str] = []
        with contextlib.suppress(OSError):
            lines = self.log.read_text(errors="replace").splitlines()
        raised = [line for line in lines if _RAISED.search(line) and not _HARMLESS.search(line)]
        shown = [*raised[:1], "...", *lines[-_LOG_TAIL_LINES:]]
        text = "\n".join(f"    {line}" for line in shown)
        return EngineError(f"mode {self.mode!r} failed: {reason}\n  from {self.log}:\n{text}")


def _serve(
    connection: Connection, make: Callable[[Settings, str], Any], settings: Settings, mode: str, log: Path
) -> None:
    """Body of the child: start the engine, then answer calls until told to stop."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent is interrupted too, and stops us
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # by way of `finally`, so that the engine stops too
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    engine = None
    try:
        engine = make(settings, mode)
        connection.send(("result", None))
        while (call := connection.recv())[0] != "stop":
            connection.send(("result", _answer(engine, connection, *call)))
    except EOFError:
        pass
    except Exception as error:
        traceback.print_exc()
        with contextlib.suppress(OSError):
            connection.send(("failed", f"{type(error).__name__}: {error}"))
    finally:
        if engine is not None:
            engine.close()


def _answer(engine: Any, connection: Connection, name: str, argument: Any) -> Any:
    def on_done() -> None:
        connection.send(("done", None))

    if name in ("run_round", "decode"):
        return getattr(engine, name)(argument, on_done)
    if name == "warm_up":
        return engine.warm_up(on_done)
    if name == "reset":
        return engine.reset()
    raise ValueError(f"unknown call {name!r}")
