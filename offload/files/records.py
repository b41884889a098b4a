"""A log of records of one size, each with a checksum: appended to by thousands, read back by millions."""

import os
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from offload.files.checksums import xxh64_rows
from offload.files.private import NEW, PrivateDirectory, explained
from offload.files.reading import OpenDirectory
from offload.files.superblock import FORMAT
from offload.files.system import reserve, write_all

Records = npt.NDArray[np.void]
"""Of a structured type."""

_READ_RECORDS = 1 << 16
"""Read at once."""


class Reading(NamedTuple):
    """What a log has.

    Attributes:
        records: those that are whole, in the order in which they were appended.
        num_bad: that are not: torn, damaged, or never written by this log.
    """

    records: Records
    num_bad: int


class RecordFormat(NamedTuple):
    """How a log's records lie in its file.

    Attributes:
        dtype: of a record with its checksum.
        seed: of the checksums; of what the log is.
    """

    dtype: np.dtype[Any]
    seed: int

    @classmethod
    def of(cls, fields: np.dtype[Any], identity: str) -> "RecordFormat":
        """See ``RecordLog``."""
        if fields.itemsize % 8:
            raise ValueError(f"a record of {fields.itemsize} bytes: must be whole words of 8")
        told = f"kv-offload records {FORMAT}\n{fields.descr}\n{identity}"
        dtype = np.dtype([("fields", fields), ("checksum", "<u8")])
        return cls(dtype, xxhash.xxh64_intdigest(told.encode()))

    def read(self, fd: int, path: Path, num_records: int) -> Reading:
        """The whole ones among the first records of a file. Raises TierError."""
        good: list[Records] = [np.zeros(0, dtype=self.dtype["fields"])]
        start = 0
        while start < num_records:
            chunk = np.zeros(min(_READ_RECORDS, num_records - start), dtype=self.dtype)
            with explained(path, "read this file"):
                _read_some(fd, _bytes_of(chunk), start * self.dtype.itemsize)
            start += len(chunk)
            good.append(chunk["fields"][chunk["checksum"] == self.checksums(chunk)])
        records = np.concatenate(good)
        return Reading(records, num_records - len(records))

    def checksums(self, chunk: Records) -> npt.NDArray[np.uint64]:
        """Those that records should have."""
        words = chunk.view("<u8").reshape(len(chunk), self.dtype.itemsize // 8)
        return xxh64_rows(words[:, :-1], self.seed)


def read_records(directory: OpenDirectory, name: str, fields: np.dtype[Any], identity: str) -> Reading:
    """What a log has; its owner may go on with it. What is appended right then is left out, or bad.

    Raises:
        TierError: it cannot be read, or is not there.
    """
    log_format = RecordFormat.of(fields, identity)
    fd = directory.open_file(name)
    try:
        num_records = os.fstat(fd).st_size // log_format.dtype.itemsize
        return log_format.read(fd, directory.path / name, num_records)
    finally:
        os.close(fd)


class RecordLog:
    """An append-only file of records.

    There is no header. A record counts if its checksum is right, whatever stands before and behind it, so
    neither a torn record nor a damaged one ends the log. The checksum is seeded with what the log is:
    a record of another log, another namespace or another format is a bad one.

    Not for several threads at once: its owner sees to that. What it raises is a TierError that names path and
    remedy, with the OSError as its cause. After a failed append the log ends where it did before.
    """

    def __init__(self, directory: PrivateDirectory, name: str, fields: np.dtype[Any], identity: str) -> None:
        """Open it, or make an empty one. Its end is padded to a whole record.

        Args:
            directory: where it is; owned.
            name: of its file.
            fields: of a record, a structured type of fixed byte order, without padding at will.
            identity: what the log is: namespace, sizes, purpose.

        Raises:
            TierError: it cannot be had.
        """
        self._format = RecordFormat.of(fields, identity)
        self._directory = directory
        self._name = name
        self._fields = fields
        self._fd = directory.open_file(name, os.O_RDWR | os.O_CREAT)
        try:
            directory.remove(name + NEW)  # of a compaction that was cut short
            self._num_records = self._padded()
        except BaseException:
            self.close()
            raise

    @property
    def path(self) -> Path:
        """Its file."""
        return self._directory.path / self._name

    @property
    def num_records(self) -> int:
        """That it has, bad ones included."""
        return self._num_records

    @property
    def record_bytes(self) -> int:
        """Of one, with its checksum."""
        return self._format.dtype.itemsize

    def blank(self, num_records: int) -> Records:
        """So many records of zeros, to be filled and appended."""
        return np.zeros(num_records, dtype=self._fields)

    def read(self) -> Reading:
        """All that are whole. O(records), less than half a second for a million."""
        return self._format.read(self._fd, self.path, self._num_records)

    def append(self, records: Records) -> None:
        """Add records at its end; with the kernel when it returns, so a killed process does not lose them."""
        with explained(self.path, "append to this file"):
            self._write(self._fd, records, self._num_records)
        self._num_records += len(records)

    def sync(self) -> None:
        """Bring what was appended to the device."""
        with explained(self.path, "sync this file"):
            os.fdatasync(self._fd)

    def reserve(self, num_records: int) -> bool:
        """Take room for so many, these included. Returns False where the file system cannot reserve."""
        with explained(self.path, f"reserve room for {num_records:,} records"):
            return reserve(self._fd, num_records * self._format.dtype.itemsize, keep_size=True)

    def compact(self, records: Records) -> None:
        """Let it have these records and no others: after a crash it has these or those of before."""
        new = self._name + NEW
        self._directory.remove(new)
        fd = self._directory.open_file(new, os.O_RDWR | os.O_CREAT | os.O_EXCL)
        try:
            with explained(self.path, "write it anew"):
                self._write(fd, records, 0)
                os.fsync(fd)
            self._directory.rename(new, self._name)
        except BaseException:
            os.close(fd)
            raise
        os.close(self._fd)
        self._fd, self._num_records = fd, len(records)
        self._directory.sync()

    def close(self) -> None:
        """Close its file. Calling it again does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def _padded(self) -> int:
        """Make its end the end of a record; returns how many there are."""
        with explained(self.path, "look at its end"):
            size = os.fstat(self._fd).st_size
            torn = size % self._format.dtype.itemsize
            if torn:
                write_all(self._fd, bytes(self._format.dtype.itemsize - torn), size)
        return -(-size // self._format.dtype.itemsize)

    def _write(self, fd: int, records: Records, start: int) -> None:
        chunk = np.empty(len(records), dtype=self._format.dtype)
        chunk["fields"] = records
        chunk["checksum"] = self._format.checksums(chunk)
        write_all(fd, _bytes_of(chunk), start * self._format.dtype.itemsize)


def _bytes_of(chunk: Records) -> memoryview:
    return chunk.view(np.uint8).data


def _read_some(fd: int, view: memoryview, offset: int) -> None:
    """As much as there is; what is behind the end of the file stays as it is."""
    while view and (num_read := os.preadv(fd, [view], offset)):
        view, offset = view[num_read:], offset + num_read
