"""A log of records: what was appended is read, whatever happened to the rest of the file."""

import errno
import os
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.errors import TierError
from offload.files.private import PrivateDirectory
from offload.files.records import RecordLog, Records
from tests.strategies import thorough

FIELDS = np.dtype([("number", "<i8"), ("name", "V16"), ("sums", "<u8", (3,))])
NAME = "log"


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[PrivateDirectory]:
    made = PrivateDirectory.open(tmp_path / "x")
    yield made
    made.close()


def opened(directory: PrivateDirectory, identity: str = "this") -> RecordLog:
    return RecordLog(directory, NAME, FIELDS, identity)


def numbered(log: RecordLog, *numbers: int) -> Records:
    records = log.blank(len(numbers))
    records["number"] = numbers
    records["sums"] = np.arange(3)
    return records


def numbers_of(log: RecordLog) -> list[int]:
    found: list[int] = log.read().records["number"].tolist()
    return found


def filled(directory: PrivateDirectory, count: int = 10) -> Path:
    log = opened(directory)
    log.append(numbered(log, *range(1, count + 1)))
    log.close()
    return log.path


def test_what_was_appended_is_read(directory: PrivateDirectory) -> None:
    log = opened(directory)
    assert log.num_records == len(log.read().records) == 0
    log.append(numbered(log, 1, 2))
    log.append(numbered(log))
    log.append(numbered(log, 3))
    log.sync()
    assert log.num_records == 3
    log.close()
    log.close()
    log = opened(directory)
    records, num_bad = log.read()
    assert (records["number"].tolist(), num_bad, log.num_records) == ([1, 2, 3], 0, 3)
    assert records["sums"].tolist() == [[0, 1, 2]] * 3
    log.close()


def test_more_than_is_read_at_once(directory: PrivateDirectory) -> None:
    log = opened(directory)
    log.append(numbered(log, *range(70_000)))
    assert numbers_of(log) == list(range(70_000))
    log.close()


@pytest.mark.parametrize("cut", range(1, 56, 7))
def test_a_torn_tail_is_padded_and_the_log_goes_on(directory: PrivateDirectory, cut: int) -> None:
    path = filled(directory)
    os.truncate(path, path.stat().st_size - cut)
    log = opened(directory)
    assert path.stat().st_size == 10 * log.record_bytes
    log.append(numbered(log, 11))
    assert numbers_of(log) == [*range(1, 10), 11]
    assert log.read().num_bad == 1
    log.close()


def test_zeros_are_no_records(directory: PrivateDirectory) -> None:
    path = filled(directory)
    os.truncate(path, path.stat().st_size * 2)
    log = opened(directory)
    log.append(numbered(log, 21))
    assert numbers_of(log) == [*range(1, 11), 21]
    log.close()


@given(st.data())
@thorough(60)
def test_only_what_was_written_is_ever_read(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Bits flipped, bytes moved, ends cut: every record that is read was appended, and the rest stays."""
    directory = PrivateDirectory.open(tmp_path_factory.mktemp("log") / "x")
    path = filled(directory, 8)
    content = bytearray(path.read_bytes())
    size = len(content) // 8
    hit = set()
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(content) - 1))
        content[at] ^= 1 << data.draw(st.integers(0, 7))
        hit.add(at // size)
    path.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    log = opened(directory)
    found = numbers_of(log)
    assert set(found) <= set(range(1, 9))
    num_left = path.stat().st_size // size
    whole = [number for number in range(1, num_left) if number - 1 not in hit]
    assert [number for number in found if number in whole] == whole
    log.close()
    directory.close()


def test_records_of_another_log_are_not_seen(directory: PrivateDirectory) -> None:
    filled(directory)
    log = opened(directory, "that")
    assert (numbers_of(log), log.read().num_bad) == ([], 10)
    log.close()
    other = RecordLog(directory, NAME, np.dtype([("a", "<i8", (6,))]), "this")
    assert other.read().records.size == 0
    other.close()


def test_a_record_is_whole_words(directory: PrivateDirectory) -> None:
    with pytest.raises(ValueError, match="12 bytes"):
        RecordLog(directory, NAME, np.dtype([("a", "<i8"), ("b", "<i4")]), "")


def test_compaction_leaves_what_it_is_given(directory: PrivateDirectory) -> None:
    filled(directory)
    log = opened(directory)
    log.compact(log.read().records[::3])
    log.append(numbered(log, 12))
    assert numbers_of(log) == [1, 4, 7, 10, 12]
    log.close()
    assert log.path.stat().st_size == 5 * log.record_bytes
    assert [path.name for path in directory.path.iterdir() if path.name.endswith(".new")] == []


@pytest.mark.parametrize("call", ["os.pwrite", "os.fsync", "os.rename"])
def test_a_compaction_that_fails_leaves_all_as_it_was(directory: PrivateDirectory, call: str) -> None:
    filled(directory)
    log = opened(directory)
    with mock.patch(call, side_effect=OSError(errno.EIO, "broken")), pytest.raises(TierError):
        log.compact(numbered(log, 99))
    log.append(numbered(log, 11))
    assert numbers_of(log) == list(range(1, 12))
    log.close()
    log = opened(directory)
    assert numbers_of(log) == list(range(1, 12))
    assert not (directory.path / (NAME + ".new")).exists()
    log.close()


def test_an_append_that_fails_half_way_leaves_the_end_where_it_was(directory: PrivateDirectory) -> None:
    filled(directory)
    log = opened(directory)
    pwrite, calls = os.pwrite, []

    def short(fd: int, view: memoryview, at: int) -> int:
        calls.append(at)
        if len(calls) > 1:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(fd, view[:50], at)

    with mock.patch("os.pwrite", short), pytest.raises(TierError, match="free space") as caught:
        log.append(numbered(log, 11, 12))
    assert isinstance(caught.value.__cause__, OSError)
    assert str(log.path) in str(caught.value)
    log.append(numbered(log, 13))
    assert numbers_of(log) == [*range(1, 11), 13]
    log.close()


def test_room_can_be_reserved(directory: PrivateDirectory) -> None:
    log = opened(directory)
    assert log.reserve(1000)
    assert log.path.stat().st_size == 0
    assert log.path.stat().st_blocks * 512 >= 1000 * log.record_bytes
    with (
        mock.patch("offload.files.records.reserve", side_effect=OSError(errno.ENOSPC, "full")),
        pytest.raises(TierError, match="fewer gib"),
    ):
        log.reserve(1000)
    log.close()
