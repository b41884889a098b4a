"""Segments that others look into: found, read alone, and never shorter than they are."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from offload.messages import Fingerprint, WorkerFacts
from offload.worker.pool.region import RegionPlan
from offload.worker.pool.segment import Segment
from offload.worker.replicas import ONE, share_pool

SIZE = 1 << 16


@pytest.fixture
def segment() -> Iterator[Segment]:
    segment = Segment.create(SIZE)
    yield segment
    segment.close()


def test_what_is_written_is_seen_and_cannot_be_written_by_who_looks(segment: Segment) -> None:
    own = segment.map(0, SIZE)
    other = Segment.look_into(segment.here)
    seen = other.map(0, SIZE, is_read_only=True)
    own[5:8] = b"abc"
    assert seen[5:8] == b"abc"
    with pytest.raises(TypeError):
        seen[5:8] = b"xyz"
    with pytest.raises(PermissionError):
        other.map(0, SIZE)
    for each in (own, seen):
        each.close()
    other.close()


def test_nobody_can_shorten_it(segment: Segment) -> None:
    """So whoever has it mapped never meets a page that is gone, which would end the process."""
    for size in (0, SIZE - 1, SIZE + 1):
        with pytest.raises(PermissionError):
            os.ftruncate(segment.here.fd, size)


def test_another_process_finds_it_while_it_is_open(segment: Segment) -> None:
    segment.map(0, SIZE)[:3] = b"abc"
    program = (
        "import sys; from offload.worker.pool.segment import Segment, SegmentName as Name;"
        "m, p, f, l, n = sys.argv[1:]; found = Segment.look_into(Name(m, int(p), int(f), l, int(n)));"
        "print(found.map(0, int(n), is_read_only=True)[:3])"
    )
    command = [sys.executable, "-c", program, *map(str, segment.here)]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "b'abc'\n"
    segment.close()
    assert subprocess.run(command, capture_output=True, check=False).returncode == 1


def test_what_is_something_else_is_not_opened(segment: Segment, tmp_path: Path) -> None:
    name = segment.here
    file = tmp_path / "kv-offload-0123"
    file.write_bytes(bytes(SIZE))
    fd = os.open(file, os.O_RDWR)
    plain = os.memfd_create("kv-offload-plain", os.MFD_CLOEXEC)
    os.ftruncate(plain, SIZE)
    for wrong in (
        name._replace(machine="another"),
        name._replace(label="kv-offload-another"),
        name._replace(label=""),
        name._replace(nbytes=SIZE // 2),
        name._replace(pid=1 << 22),
        name._replace(fd=1 << 20),
        name._replace(fd=fd, label=str(file)),
        name._replace(fd=fd, label="kv-offload-0123"),
        name._replace(fd=plain, label="kv-offload-plain"),  # it could be shortened
    ):
        with pytest.raises(OSError, match=r"."):
            Segment.look_into(wrong)
    os.close(fd)
    os.close(plain)


@pytest.mark.parametrize("is_lasting", [False, True])
def test_a_pool_that_is_seen_lies_in_a_segment_that_stays_open(is_lasting: bool, tmp_path: Path) -> None:
    facts = WorkerFacts(20, 4096, Fingerprint("", "", 1, 16, "", ""))
    plan = RegionPlan(tmp_path, "namespace", 0, 1) if is_lasting else None
    sharing = share_pool(ONE, facts, plan=plan, is_seen=True)
    assert sharing.segment is not None and sharing.tables is not None
    assert (sharing.tables.fills == -1).all()
    assert (sharing.lasting is not None) == is_lasting
    if is_lasting:
        with pytest.raises(OSError, match="not"):
            Segment.look_into(sharing.segment.here)
    else:
        Segment.look_into(sharing.segment.here).close()
    if sharing.lasting is not None:
        sharing.lasting.close()
    sharing.segment.close()
