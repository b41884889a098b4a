"""Runs an ``Engine`` in a fresh process, so that engines leave nothing behind, whatever they set or spawn."""

import contextlib
import multiprocessing
import multiprocessing.forkserver
import os
import pickle
import signal
import traceback
from collections.abc import Callable, Iterator
from functools import cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

from benchmarks.common.process import ENVIRONMENT
from tests.engine.engine import Engine

P = ParamSpec("P")
R = TypeVar("R")

_CALL_SECONDS = 240
_STOP_SECONDS = 60
_LOG_TAIL_LINES = 60


class EngineProcess:
    """A context manager: an engine started on entry, stopped on exit; its output goes to the file ``log``."""

    def __init__(self, log: Path, extra_config: dict[str, Any] | None, **settings: Any) -> None:
        """``extra_config`` and ``settings`` are those of ``Engine``."""
        self._log = log
        context = _context()
        self._connection, self._child_end = context.Pipe()
        self._session: int | None = None
        self._process = context.Process(
            target=_serve, args=(self._child_end, log, extra_config, settings), name=log.stem
        )

    def __enter__(self) -> "EngineProcess":
        self._process.start()
        self._session = self._process.pid
        self._child_end.close()
        try:
            self._receive()
        except AssertionError:
            self._connection.close()
            self._process.join()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        """Raises AssertionError if the engine did not stop by itself, or not cleanly."""
        with contextlib.suppress(OSError):
            self._connection.send(None)
        self._process.join(_STOP_SECONDS)
        running = self._process.is_alive()
        if running:
            self._kill()
        self._connection.close()
        assert not running, f"the engine did not stop within {_STOP_SECONDS} s{self._tail()}"
        assert self._process.exitcode == 0, f"the engine left with {self._process.exitcode}{self._tail()}"
        self._process.close()

    def run(self, method: Callable[Concatenate[Engine, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call ``method``, of ``Engine`` or any function of a module on an engine, over there.

        What it raises is raised here as AssertionError, with the traceback of over there.
        """
        self._connection.send((method, args, kwargs))
        return self._receive()

    def processes(self) -> dict[int, str]:
        """Its process and all that it made, however far they are from it: ids and names."""
        assert self._session is not None
        found = {}
        for directory in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                _, _, after = (directory / "stat").read_text().rpartition(")")
                state, _, _, session = after.split()[:4]
                if int(session) == self._session and state != "Z":
                    found[int(directory.name)] = (directory / "cmdline").read_text().replace("\0", " ")
        return found

    def log(self) -> str:
        """What the engine has said so far."""
        return self._log.read_text(errors="replace")

    def _receive(self) -> Any:
        if not self._connection.poll(_CALL_SECONDS):
            self._kill()
            raise AssertionError(f"no answer from the engine's process in {_CALL_SECONDS} s{self._tail()}")
        try:
            succeeded, value = self._connection.recv()
        except EOFError:
            raise AssertionError(f"the engine's process has died{self._tail()}") from None
        assert succeeded, f"in the engine's process:\n{value}(its log is {self._log})"
        return value

    def _kill(self) -> None:
        """End its process and those that the engine made."""
        assert self._process.pid is not None
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.join()

    def _tail(self) -> str:
        lines = self.log().splitlines()[-_LOG_TAIL_LINES:]
        return "\n".join([f"\nend of {self._log}:", *lines])


@cache
def _context() -> Any:
    """Makes processes that have imported vLLM already, which takes longer than starting a small engine.

    They are forked from a process that has done nothing else, with the environment that engines need. A
    process that CUDA has looked at may not fork.
    """
    if Path("/dev/nvidia0").exists():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.long_document_qa.imports"])
    with _environment():
        multiprocessing.forkserver.ensure_running()
    return context


@contextlib.contextmanager
def _environment() -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(ENVIRONMENT)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


def _serve(
    connection: Connection, log: Path, extra_config: dict[str, Any] | None, settings: dict[str, Any]
) -> None:
    """Body of the process: start the engine, then make calls until told to stop."""
    os.setsid()  # an interrupt from the terminal is the parent's affair, and the parent stops us
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    try:
        engine = Engine(extra_config, **settings)
    except Exception:
        connection.send((False, traceback.format_exc()))
        return
    connection.send((True, None))
    with contextlib.suppress(EOFError, BrokenPipeError):  # the parent is gone
        while (call := connection.recv()) is not None:
            method, args, kwargs = call
            try:
                reply = pickle.dumps((True, method(engine, *args, **kwargs)))
            except Exception:
                reply = pickle.dumps((False, traceback.format_exc()))
            connection.send_bytes(reply)
    engine.close()
