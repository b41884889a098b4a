"""What others keep KV in on a disk: SQLite, RocksDB, one file per extent. Each as fast as it can be made.

All move the same extents from and to the same slots, from as many threads, and check them against the same
seals as our slab does: none of them has checksums of its own over all of that, but RocksDB. None waits for
the device, as our slab does not. What they put off, such as a checkpoint or a flush, belongs to the turn.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import threading
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path

__all__ = ["Files", "Other", "RocksDB", "SQLite", "reason_against_rocksdb"]

Views = Sequence[memoryview]
"""The slots of an extent."""


class Other(ABC):
    """Keeps extents by number. Calls of ``put`` and ``get`` come from several threads."""

    def __init__(self, path: Path, num_threads: int) -> None:
        """Open it in a directory of its own, made if it is not there."""
        path.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._num_threads = num_threads

    @abstractmethod
    def put(self, number: int, views: Views) -> None:
        """What was there is replaced."""

    @abstractmethod
    def get(self, number: int, views: Views) -> None:
        """Fill these slots."""

    @abstractmethod
    def close(self) -> None:
        """Do what was put off."""

    @classmethod
    def forget_pages(cls, path: Path) -> None:
        """What is on the disk is not in the page cache any more. Nobody may have it open."""
        for file in path.rglob("*"):
            if file.is_file():
                fd = os.open(file, os.O_RDONLY)
                os.fdatasync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(fd)


class Files(Other):
    """One file per extent, written beside the old one with O_DIRECT, and then renamed."""

    def put(self, number: int, views: Views) -> None:
        new = self.path / f"{number}.new"
        fd = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_DIRECT, 0o600)
        try:
            _all(os.writev(fd, views), views)
        finally:
            os.close(fd)
        new.rename(self.path / str(number))

    def get(self, number: int, views: Views) -> None:
        fd = os.open(self.path / str(number), os.O_RDONLY | os.O_DIRECT)
        try:
            _all(os.readv(fd, views), views)
        finally:
            os.close(fd)

    def close(self) -> None:
        """Nothing was."""


class SQLite(Other):
    """A table of blobs; a write-ahead log, which is not synced. One thread writes, as SQLite has it."""

    def __init__(self, path: Path, num_threads: int) -> None:
        super().__init__(path, num_threads)
        self._lock = threading.Lock()
        self._writer = self._connection()
        self._writer.execute("CREATE TABLE IF NOT EXISTS extents (number INTEGER PRIMARY KEY, bytes BLOB)")
        self._local = threading.local()
        self._readers: list[sqlite3.Connection] = []

    def put(self, number: int, views: Views) -> None:
        content = b"".join(views)
        with self._lock, self._writer:
            self._writer.execute("INSERT OR REPLACE INTO extents VALUES (?, ?)", (number, content))

    def get(self, number: int, views: Views) -> None:
        reader = getattr(self._local, "reader", None)
        if reader is None:
            reader = self._local.reader = self._connection()
            self._readers.append(reader)
        with reader.blobopen("extents", "bytes", number, readonly=True) as blob:
            for view in views:
                view[:] = blob.read(len(view))

    def close(self) -> None:
        for each in self._readers:
            each.close()
        self._writer.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        self._writer.close()

    def _connection(self) -> sqlite3.Connection:
        made = sqlite3.connect(self.path / "db", check_same_thread=False)
        for setting in ("page_size=65536", "journal_mode=WAL", "synchronous=OFF", "cache_size=-16384"):
            made.execute(f"PRAGMA {setting}")
        return made


class RocksDB(Other):
    """Values in blob files, uncompressed; direct I/O but for its log."""

    def __init__(self, path: Path, num_threads: int) -> None:
        from rocksdict import DBCompressionType, Options, Rdict

        super().__init__(path, num_threads)
        options = Options(raw_mode=True)
        options.create_if_missing(True)
        options.increase_parallelism(num_threads)
        options.set_compression_type(DBCompressionType.none())
        options.set_enable_blob_files(True)
        options.set_blob_compression_type(DBCompressionType.none())
        options.set_enable_blob_gc(True)
        options.set_use_direct_reads(True)
        options.set_use_direct_io_for_flush_and_compaction(True)
        self._db = Rdict(str(path), options)

    def put(self, number: int, views: Views) -> None:
        self._db.put(number.to_bytes(8, "big"), b"".join(views))

    def get(self, number: int, views: Views) -> None:
        content = memoryview(self._db.get(number.to_bytes(8, "big")))
        at = 0
        for view in views:
            view[:] = content[at : at + len(view)]
            at += len(view)

    def close(self) -> None:
        self._db.flush()
        self._db.close()

    @classmethod
    def begin_anew(cls, path: Path) -> None:
        """Without what was replaced, which it keeps for long."""
        shutil.rmtree(path, ignore_errors=True)


def reason_against_rocksdb() -> str | None:
    """Why it cannot be measured; None if it can."""
    try:
        import rocksdict  # noqa: F401
    except ImportError:
        return "RocksDB: not measured, rocksdict is not installed (pip install kv-offload[bench])"
    return None


def _all(num_bytes: int, views: Views) -> None:
    wanted = sum(map(len, views))
    if num_bytes != wanted:
        raise RuntimeError(f"{num_bytes} of {wanted} bytes were moved")
