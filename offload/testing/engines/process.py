"""An engine in a process of its own, so that it leaves nothing behind, whatever it sets or makes."""

import contextlib
import multiprocessing
import multiprocessing.forkserver
import os
import pickle
import re
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Concatenate, Generic, NoReturn, ParamSpec, Protocol, Self, TypeVar

from offload.testing.engines.environment import environment_of
from offload.testing.engines.sessions import end_session, kill, processes_of

__all__ = ["IMPORTS", "EngineError", "EngineProcess"]

IMPORTS = "offload.testing.engines.imports"
"""Module to fork engines from: it has imported vLLM, which takes longer than starting a small engine."""

_LOG_TAIL_LINES = 40
_RAISED = re.compile(r"\b[A-Z]\w*(Error|Exception|Refused): \S")
_HARMLESS = re.compile(r"\b(WARNING|INFO)\b")
_STOP_SECONDS = 60.0
_GRACE_SECONDS = 5.0
_DONE, _RESULT, _FAILED = "done", "result", "failed"


class Closable(Protocol):
    """What can live in a process of its own."""

    def close(self) -> None:
        """Called at the end."""


E = TypeVar("E", bound=Closable)
P = ParamSpec("P")
R = TypeVar("R")


class EngineError(RuntimeError):
    """The engine did not start, or failed; the message has the first exception in its log, and its end."""


class EngineProcess(Generic[E]):
    """A context manager: an engine that starts on entry, in a session of its own, and ends on exit.

    To start several side by side, ``begin`` each, then ``wait`` for each; what is begun must be exited.

    Args:
        make: makes the engine over there; something that can be pickled.
        name: in errors, and of the process.
        log: file for its output; None: a temporary one, kept only if anything fails.
        variables: of its environment, beside ours. What is read when a process begins, as glibc does, counts
            for the first engine that is forked.
        fork_from: modules that the process it is forked from has imported; none: it starts from nothing. A
            process that CUDA has looked at may not fork.
        on_wait: called here about once a second while it starts.
        call_seconds: after which a start or a call is given up, and the engine killed; None: never.
        must_end_well: EngineError at the end if it did not end by itself, with all that it made.
    """

    def __init__(
        self,
        make: Callable[[], E],
        name: str = "vllm",
        *,
        log: Path | None = None,
        variables: Mapping[str, str] | None = None,
        fork_from: Sequence[str] = (),
        on_wait: Callable[[], None] = lambda: None,
        call_seconds: float | None = None,
        must_end_well: bool = False,
    ) -> None:
        self.name = name
        self.num_killed = 0
        """Processes that did not end by themselves."""
        self._keeps_log = log is not None
        if log is None:
            handle, path = tempfile.mkstemp(prefix=f"kv-offload-{name}-", suffix=".log")
            os.close(handle)
            log = Path(path)
        self._log = log
        self._variables = dict(variables or {})
        self._on_wait = on_wait
        self._call_seconds = call_seconds
        self._must_end_well = must_end_well
        self._forks = bool(fork_from)
        context: Any = multiprocessing.get_context("forkserver" if fork_from else "spawn")
        if fork_from:
            context.set_forkserver_preload(list(fork_from))
        self._connection, self._child_end = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(self._child_end, make, self._variables, log), name=name
        )

    @property
    def pid(self) -> int:
        """Process id of the front end; the engine's own processes are its descendants."""
        assert self._process.pid is not None
        return int(self._process.pid)

    def begin(self) -> None:
        """Let it start, and return at once."""
        with environment_of(self._variables):
            if self._forks:
                multiprocessing.forkserver.ensure_running()
            self._process.start()
        self._child_end.close()

    def wait(self) -> None:
        """Return once it has started. EngineError if it does not."""
        seconds = 0.0
        while not self._connection.poll(1.0):
            self._on_wait()
            seconds += 1.0
            if self._call_seconds is not None and seconds >= self._call_seconds:
                self._give_up()
        self._receive()

    def __enter__(self) -> Self:
        self.begin()
        try:
            self.wait()
        except EngineError:
            self.stop()
            raise
        except BaseException:
            self.stop(_GRACE_SECONDS)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.stop(_GRACE_SECONDS)
        elif self.stop():
            if not self._keeps_log:
                self._log.unlink(missing_ok=True)
        elif self._must_end_well:
            raise self._failure(f"{self.num_killed} of its processes had to be killed, or it left an error")

    def stop(self, seconds: float = _STOP_SECONDS) -> bool:
        """Ask it to stop; after that many seconds tell it to end; kill what is left at last.

        Returns when all its processes are gone, and with them its memory on host and GPU: whether it ended
        by itself, and without an error.
        """
        with contextlib.suppress(OSError):
            self._connection.send(None)
        self._process.join(seconds)
        if self._process.is_alive():
            self.num_killed += 1
            self._process.terminate()
            self._process.join(_GRACE_SECONDS)
        self.num_killed += end_session(self.pid, _GRACE_SECONDS)
        self._process.join()
        self._connection.close()
        return self._process.exitcode == 0 and not self.num_killed

    def run(self, method: Callable[Concatenate[E, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Call ``method``, of the engine or any function of a module on it, over there.

        What it raises is raised here as EngineError; the engine lives on.
        """
        result: R = self._call(lambda: None, False, method, args, kwargs)
        return result

    def run_told(self, on_done: Callable[[], None], method: Callable[..., R], *args: Any) -> R:
        """The same for a method that calls its last argument over there: then ``on_done`` is called here."""
        result: R = self._call(on_done, True, method, args, {})
        return result

    def processes(self) -> dict[int, str]:
        """Its process and all that it made, however far they are from it: ids and command lines."""
        return processes_of(self.pid)

    def log(self) -> str:
        """What the engine has said so far."""
        return self._log.read_text(errors="replace")

    def _call(self, on_done: Callable[[], None], *call: Any) -> Any:
        try:
            self._connection.send(call)
        except OSError as error:
            raise self._failure("its process has ended") from error
        return self._receive(on_done)

    def _receive(self, on_done: Callable[[], None] = lambda: None) -> Any:
        while True:
            if not self._connection.poll(self._call_seconds):
                self._give_up()
            try:
                kind, value = self._connection.recv()
            except (EOFError, OSError) as error:
                raise self._failure("its process has ended") from error
            if kind == _RESULT:
                return value
            if kind == _FAILED:
                raise self._failure(value)
            on_done()

    def _give_up(self) -> NoReturn:
        kill(self.processes())
        raise self._failure(f"no answer in {self._call_seconds:g} s")

    def _failure(self, reason: str) -> EngineError:
        lines: list[str] = []
        with contextlib.suppress(OSError):
            lines = self.log().splitlines()
        raised = [line for line in lines if _RAISED.search(line) and not _HARMLESS.search(line)]
        text = "\n".join(f"    {line}" for line in [*raised[:1], "...", *lines[-_LOG_TAIL_LINES:]])
        return EngineError(f"engine {self.name!r} failed: {reason}\n  from {self._log}:\n{text}")


def _serve(
    connection: Connection, make: Callable[[], Closable], variables: dict[str, str], log: Path
) -> None:
    """Body of the process: start the engine, then answer calls until told to stop."""
    os.setsid()  # an interrupt from the terminal is the parent's affair, and the parent stops us
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # by way of `finally`, so that the engine stops too
    os.environ.update(variables)
    with log.open("w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
    try:
        engine = make()
    except Exception as error:
        connection.send_bytes(_failed(error))
        return
    try:
        connection.send((_RESULT, None))
        while (call := connection.recv()) is not None:
            connection.send_bytes(_answer(engine, connection, *call))
    except (EOFError, BrokenPipeError):
        pass  # the parent is gone
    finally:
        engine.close()


def _answer(
    engine: Closable,
    connection: Connection,
    is_told: bool,
    method: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> bytes:
    if is_told:
        args = (*args, lambda: connection.send((_DONE, None)))
    try:
        return pickle.dumps((_RESULT, method(engine, *args, **kwargs)))
    except Exception as error:
        return _failed(error)


def _failed(error: Exception) -> bytes:
    traceback.print_exception(error)
    sys.stderr.flush()
    return pickle.dumps((_FAILED, f"{type(error).__name__}: {error}"))
