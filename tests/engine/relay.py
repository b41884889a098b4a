"""A wire between an engine and its peer, that counts what comes over it, and can be held in the middle."""

import contextlib
import socket
import threading
from typing import Self

_PIECE = 64 << 10


class Relay:
    """Takes connections at ``port`` and passes them on to another one, of this machine.

    Args:
        target: the port of the peer.
        counts_questions: bytes that go to the peer are counted, and held, in place of those it sends.
    """

    def __init__(self, target: int, *, counts_questions: bool = False) -> None:
        self._target = target
        self._counts_questions = counts_questions
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listening.getsockname()[1])
        self._lock = threading.Condition()
        self._passed = 0  # bytes that are counted, on all connections
        self._limit: int | None = None
        self._is_held = False
        self._open: set[socket.socket] = set()
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._listening.close()
        self.let_go()

    def hold_after(self, num_bytes: int) -> None:
        """Once so many bytes more have passed, no further ones are passed on until ``let_go``."""
        with self._lock:
            self._limit = self._passed + num_bytes

    def wait_until_held(self, seconds: float) -> None:
        """It is in the middle of what is counted."""
        with self._lock:
            assert self._lock.wait_for(lambda: self._is_held, seconds), "so many bytes never came"

    def let_go(self) -> None:
        """Whatever is held is passed on."""
        with self._lock:
            self._limit, self._is_held = None, False
            self._lock.notify_all()

    def cut(self) -> None:
        """Close all connections, without what is held."""
        with self._lock:
            for each in self._open:
                with contextlib.suppress(OSError):
                    each.shutdown(socket.SHUT_RDWR)
        self.let_go()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                asking, _ = self._listening.accept()
                try:
                    answering = socket.create_connection(("127.0.0.1", self._target))
                except OSError:
                    asking.close()
                    continue
                with self._lock:
                    self._open |= {asking, answering}
                is_question = self._counts_questions
                for ends in ((asking, answering, is_question), (answering, asking, not is_question)):
                    threading.Thread(target=self._pass_on, args=ends, daemon=True).start()

    def _pass_on(self, source: socket.socket, target: socket.socket, is_counted: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(_PIECE):
                if is_counted:
                    self._count(target, data)
                else:
                    target.sendall(data)
        for each in (source, target):
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        with self._lock:
            self._open.discard(source)
        source.close()

    def _count(self, target: socket.socket, data: bytes) -> None:
        with self._lock:
            room = len(data) if self._limit is None else max(0, min(len(data), self._limit - self._passed))
            self._passed += len(data)
        target.sendall(data[:room])
        if room == len(data):
            return
        with self._lock:
            self._is_held = True
            self._lock.notify_all()
            self._lock.wait_for(lambda: not self._is_held)
        target.sendall(data[room:])
