"""Appends lines to a file on a thread of its own: a file system that hangs holds up no other thread."""

import errno
import logging
import os
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain, count
from pathlib import Path
from queue import SimpleQueue
from threading import Event, Thread

logger = logging.getLogger(__name__)

MAX_WAITING_BYTES = 64 << 20
"""What may wait to be written. More is dropped."""

_PRIVATE = 0o600  # prefix hashes tell who holds a prompt that it was sent


class TraceWriter:
    """One new file; whole pieces are appended to it in order. An existing file is left alone, see ``path``.

    The thread is a daemon, so one that hangs does not keep the process from ending. A fault in writing ends
    the recording with one warning.
    """

    def __init__(self, path: Path) -> None:
        """Nothing is made before the first piece: neither the file nor the thread.

        Args:
            path: of the file. If that exists when the first piece is written: ``name.2.ext`` and so on.
        """
        self.path = path
        """Where the file is, once the first piece is written."""
        self.has_ended = False
        """Closed, or a write has failed: nothing more is taken."""
        self._thread: Thread | None = None
        self._queue: SimpleQueue[bytes | Event | None] = SimpleQueue()
        self._num_appended = 0  # bytes; changed by the caller's thread only
        self._num_done = 0  # bytes written or given up; changed by the writer's thread only
        self._is_open = False
        self._is_broken = False
        self._is_closed = False

    @property
    def num_waiting(self) -> int:
        """Bytes that are not written yet."""
        return self._num_appended - self._num_done

    def append(self, content: bytes) -> bool:
        """Have ``content`` written; never waits. False: it is dropped, because too much waits already."""
        if self.has_ended or self.num_waiting + len(content) > MAX_WAITING_BYTES:
            return False
        if self._thread is None and not self._start():
            return False
        self._num_appended += len(content)
        self._queue.put(content)
        return True

    def wait(self, timeout: float) -> bool:
        """Wait until all that was appended is written or given up; False after ``timeout`` seconds."""
        if self._thread is None:
            return True
        if self._is_closed:
            self._thread.join(timeout)
            return not self._thread.is_alive()
        done = Event()
        self._queue.put(done)
        return done.wait(timeout)

    def close(self, timeout: float) -> bool:
        """End the thread once what waits is written; whether that took ``timeout`` seconds at most."""
        if not self._is_closed:
            self._queue.put(None)
        self._is_closed = self.has_ended = True
        return self.wait(timeout)

    def check_invariants(self) -> None:
        """What waits is bounded."""
        assert 0 <= self.num_waiting <= MAX_WAITING_BYTES, (
            f"{self._num_appended} bytes appended, {self._num_done} of them done"
        )
        assert self._thread is not None or not self.num_waiting, "nobody writes what waits"

    def _start(self) -> bool:
        try:
            thread = Thread(target=self._run, name="kv-offload trace", daemon=True)
            thread.start()
        except RuntimeError as error:  # the process may have no more threads
            self._give_up(error)
            return False
        self._thread = thread
        return True

    def _run(self) -> None:
        while (item := self._queue.get()) is not None:
            if isinstance(item, Event):
                item.set()
                continue
            self._write(item)
            self._num_done += len(item)

    def _write(self, content: bytes) -> None:
        if self._is_broken:
            return
        try:
            if not self._is_open:
                asked_for, self.path = self.path, _make(self.path)
                self._is_open = True
                level = logging.INFO if self.path == asked_for else logging.WARNING
                logger.log(level, "recording a trace of finished requests in %s", self.path)
            _append(self.path, content)
        except (OSError, ValueError) as error:
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        self._is_broken = self.has_ended = True
        logger.warning("recording the trace %s has ended, it cannot be written: %s", self.path, error)


def _make(path: Path) -> Path:
    """Make an empty file at ``path``, or beside it if something is there; its owner's alone."""
    beside: Iterator[Path] = (path.with_suffix(f".{number}{path.suffix}") for number in count(2))
    for name in chain([path], beside):
        with suppress(FileExistsError):
            name.touch(_PRIVATE, exist_ok=False)
            break
    return name


def _append(path: Path, content: bytes) -> None:
    """Append all of ``content`` to a file that is there, or nothing."""
    with path.open("r+b", buffering=0) as file:
        end = file.seek(0, os.SEEK_END)
        written = 0
        try:
            while written < len(content):
                num = file.write(content[written:])
                if not num:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                written += num
        except OSError:
            with suppress(OSError):
                file.truncate(end)
            raise
