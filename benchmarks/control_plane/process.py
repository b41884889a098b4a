"""Starts the benchmark's processes and calls into them."""

from __future__ import annotations

import multiprocessing
import os
from types import TracebackType
from typing import Any

__all__ = ["Child", "ChildError"]

# Children are forked from a server that has imported vLLM once and done nothing else.
_context = multiprocessing.get_context("forkserver")
_CHILD_MODULE = "benchmarks.control_plane.child"
_STOP_SECONDS = 30.0


class ChildError(RuntimeError):
    """A child ended, or its call failed; the message is the child's."""


class Child:
    """A context manager: one process that holds one connector, so that no other's objects and garbage count.

    Args:
        kind: a name of ``benchmarks.control_plane.child``.
        connector: one of ``benchmarks.engine_replay.CONNECTORS``.
        arguments: more for the constructor.
    """

    def __init__(self, kind: str, connector: str, *arguments: Any) -> None:
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        _context.set_forkserver_preload([_CHILD_MODULE])
        self.connector = connector
        self._connection, self._child_end = _context.Pipe()
        self._process = _context.Process(
            target=_serve, args=(self._child_end, kind, (connector, *arguments)), daemon=True
        )

    def __enter__(self) -> Child:
        self._process.start()
        self._child_end.close()
        self._receive()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._connection.close()
        self._process.join(_STOP_SECONDS)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()

    def call(self, name: str, *arguments: Any) -> Any:
        """Call a method of the child's object and wait for its result."""
        self._connection.send((name, *arguments))
        return self._receive()

    def _receive(self) -> Any:
        try:
            is_good, value = self._connection.recv()
        except EOFError as error:
            raise ChildError(f"the process of {self.connector} has ended") from error
        if not is_good:
            raise ChildError(value)
        return value


def _serve(*arguments: Any) -> None:
    from benchmarks.control_plane.child import serve

    serve(*arguments)
