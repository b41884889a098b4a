"""The operator socket of an engine: says how the engine stands, whatever the engine is doing."""

import json
import logging
import os
import secrets
import socket
import struct
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

from offload.errors import OperatorError
from offload.operator.directory import MOST_DIRECTORY_BYTES, MOST_PATH_BYTES, SUFFIX, make_private, sockets_in

logger = logging.getLogger(__name__)

MOST_BYTES = 4096
"""Of a request, with the newline behind it."""

_MOST_REQUESTS = 64
"""On one connection."""
_SECONDS = 2.0
"""That one connection takes at most; others wait for it."""
_BACKLOG = 16
_CREDENTIALS = struct.Struct("3i")

Told = Mapping[str, Any]
"""What is known of an engine at one moment. Nobody changes it any more."""


Handler = Callable[[Mapping[str, Any]], Any]
"""Does what a request asks for, on the socket's thread. Returns the answer, or raises OperatorError."""


class OperatorSocket:
    """A unix socket, 0600 in a directory 0700, and the daemon thread that answers there.

    A request is a line of JSON with a ``verb``: ``status`` for all that is known, or the name of one part of
    it. So is the answer: ``{"ok": true, "result": ...}`` or ``{"ok": false, "error": ...}``. The thread
    reads what was published last, and nothing else of the engine. So it answers also where no step ends.
    Other verbs have a handler.

    The path appears when somebody listens there: the socket is made under another name. Paths at which nobody
    listens are of engines that were killed, and are removed by the next one.
    """

    def __init__(
        self, directory: Path, told: Told, handlers: Mapping[str, Handler] = MappingProxyType({})
    ) -> None:
        """Open it.

        Args:
            directory: for sockets; made if it is not there.
            told: what is known at the beginning.
            handlers: of other verbs; they wait for nobody.

        Raises:
            OperatorError: it cannot be had.
        """
        self.name = f"{os.getpid()}-{secrets.token_hex(2)}"
        self.path = directory / f"{self.name}{SUFFIX}"
        self._told = told
        self._handlers = handlers
        self._since = self._at = time.monotonic()
        new = directory / f".{self.name}.new"
        if len(os.fsencode(new)) > MOST_PATH_BYTES:
            raise OperatorError(
                f"{self.path} is too long for a socket's path; set operator_socket to a directory of at most "
                f"{MOST_DIRECTORY_BYTES} bytes"
            )
        make_private(directory)
        _remove_stale(directory)
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._listener.bind(str(new))
            new.chmod(0o600)
            self._listener.listen(_BACKLOG)
            new.rename(self.path)
        except OSError as error:
            self._listener.close()
            new.unlink(missing_ok=True)
            raise OperatorError(f"{self.path}: {error.strerror or error}") from error
        _LISTENERS.add(self._listener)
        threading.Thread(target=self._serve, name="kv-offload-operator", daemon=True).start()

    def publish(self, told: Told) -> None:
        """From now on that is what is known. O(1); nobody waits for anybody."""
        self._told, self._at = told, time.monotonic()

    def close(self) -> None:
        """Nobody is answered any more. Calling it again does no harm."""
        self.path.unlink(missing_ok=True)
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # the thread wakes up and ends
        self._listener.close()

    # On its thread

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                if self._listener.fileno() < 0 or not self.path.exists():
                    return
                time.sleep(0.1)  # of descriptors or memory there are too few now
                continue
            with connection:
                try:
                    self._answer_all(connection)
                except OSError:
                    pass  # whoever asked has gone
                except Exception:  # the next one is answered all the same
                    logger.exception("a question at the operator socket was not answered")

    def _answer_all(self, connection: socket.socket) -> None:
        _, uid, _ = _CREDENTIALS.unpack(
            connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        )
        if uid not in (0, os.geteuid()):
            return
        until, buffer = time.monotonic() + _SECONDS, b""
        for _ in range(_MOST_REQUESTS):
            while b"\n" not in buffer:
                if len(buffer) >= MOST_BYTES:
                    return
                connection.settimeout(max(0.001, until - time.monotonic()))
                received = connection.recv(MOST_BYTES - len(buffer))
                if not received:
                    return
                buffer += received
            line, _, buffer = buffer.partition(b"\n")
            connection.settimeout(max(0.001, until - time.monotonic()))
            connection.sendall(json.dumps(self._answer(line)).encode() + b"\n")

    def _answer(self, line: bytes) -> Told:
        try:
            request = json.loads(line)
        except (ValueError, RecursionError):
            return {"ok": False, "error": "a request is a line of JSON"}
        verb = request.get("verb") if isinstance(request, dict) else None
        told, now = self._told, time.monotonic()
        whole = {
            "engine": self.name,
            "pid": os.getpid(),
            "uptime_seconds": round(now - self._since, 3),
            "age_seconds": round(now - self._at, 3),
            **told,
        }
        if verb == "status":
            return {"ok": True, "result": whole}
        if isinstance(verb, str) and verb in told:
            return {"ok": True, "result": told[verb]}
        if isinstance(verb, str) and verb in self._handlers:
            try:
                return {"ok": True, "result": self._handlers[verb](request)}
            except OperatorError as error:
                return {"ok": False, "error": str(error)}
        return {"ok": False, "error": f"verbs are: {', '.join(['status', *told, *self._handlers])}"}


def _remove_stale(directory: Path) -> None:
    for path in sockets_in(directory):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe, suppress(OSError):
            probe.settimeout(0.2)
            try:
                probe.connect(str(path))
            except ConnectionRefusedError:
                path.unlink(missing_ok=True)


_LISTENERS: "weakref.WeakSet[socket.socket]" = weakref.WeakSet()


def _close_in_child() -> None:
    """A process that was forked does not keep the socket of its parent open when that has ended."""
    for listener in list(_LISTENERS):
        listener.close()


os.register_at_fork(after_in_child=_close_in_child)
