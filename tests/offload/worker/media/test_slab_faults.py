"""A disk that fails or hangs ends jobs, and never the engine."""

import errno
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest

from offload.worker.media.base import Verb
from offload.worker.media.slab import SlabMedium, SlabOptions
from tests.offload.worker.media.bench import (
    EXTENT,
    NAMESPACE,
    PLACES,
    Pool,
    ends,
    get,
    run,
    slab,
    wait_until,
)

pytestmark = pytest.mark.timeout(120)


class Gate:
    """Stands in for a call of the kernel; while it is shut, calls hang in it."""

    def __init__(self, call: Callable[..., int]) -> None:
        self._call = call
        self._is_open = threading.Event()
        self._is_open.set()
        self.num_inside = 0

    def __call__(self, *arguments: object) -> int:
        self.num_inside += 1
        self._is_open.wait()
        self.num_inside -= 1
        return self._call(*arguments)

    def shut(self) -> None:
        self._is_open.clear()

    def open(self) -> None:
        self._is_open.set()


@contextmanager
def gate(name: str) -> Iterator[Gate]:
    made = Gate(getattr(os, name))
    with mock.patch(f"os.{name}", made):
        try:
            yield made
        finally:
            made.open()


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def pool() -> Pool:
    return Pool()


def clocked(path: Path, pool: Pool) -> tuple[SlabMedium, Clock]:
    clock = Clock()
    medium = SlabMedium(
        path,
        pool.slots,
        namespace=NAMESPACE,
        extent_slots=EXTENT,
        num_places=PLACES,
        options=SlabOptions(get_threads=2, put_threads=2, hang_seconds=10),
        clock=clock,
    )
    return medium, clock


# Faults


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EROFS, errno.ENODEV])
@pytest.mark.parametrize(
    ("verb", "call"), [(Verb.PUT, "pwritev"), (Verb.PUT, "pwrite"), (Verb.GET, "preadv")]
)
def test_a_disk_that_fails_turns_it_off(
    tmp_path: Path, pool: Pool, caplog: pytest.LogCaptureFixture, code: int, verb: Verb, call: str
) -> None:
    medium = slab(tmp_path / "x", pool)
    assert run(medium, pool.put(1, [(0, 1, [0])])).num_good == 1
    assert not medium.is_off
    jobs = {Verb.PUT: pool.put(2, [(1, 2, [1]), (2, 2, [2])]), Verb.GET: get(2, [(0, 1, [9])])}
    with mock.patch(f"os.{call}", side_effect=OSError(code, os.strerror(code))):
        end = run(medium, jobs[verb])
    assert end.num_good == 0
    assert os.strerror(code) in str(end.error)
    assert medium.is_off
    for job in (pool.put(3, [(3, 3, [3])]), get(4, [(0, 1, [9])])):
        end = run(medium, job)
        assert end.num_good == 0
        assert "is off" in str(end.error)
    medium.check_invariants()
    assert medium.close(30)
    warnings = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert len(warnings) == 1, "one line in the log"
    medium = slab(tmp_path / "x", pool)
    assert run(medium, get(1, [(0, 1, [9])])).num_good == 1, "it is back when it is opened again"
    assert run(medium, get(1, [(1, 2, [9])])).num_good == 0
    assert medium.close(30)


@pytest.mark.parametrize("code", [errno.ENOMEM, errno.EAGAIN])
def test_what_says_nothing_about_the_disk_fails_one_job(tmp_path: Path, pool: Pool, code: int) -> None:
    medium = slab(tmp_path / "x", pool)
    with mock.patch("os.pwritev", side_effect=OSError(code, os.strerror(code))):
        assert run(medium, pool.put(1, [(0, 1, [0])])).num_good == 0
    assert not medium.is_off
    assert run(medium, pool.put(2, [(0, 2, [0])])).num_good == 1
    assert medium.close(30)


def test_a_sync_that_fails_turns_it_off(tmp_path: Path, pool: Pool) -> None:
    medium = slab(tmp_path / "x", pool, sync_seconds=0.001)
    with mock.patch("os.fdatasync", side_effect=OSError(errno.EIO, os.strerror(errno.EIO))):
        run(medium, pool.put(1, [(0, 1, [0])]))
        wait_until(lambda: medium.is_off)
    assert medium.close(30)


def test_what_was_put_is_synced_the_bytes_before_the_record(tmp_path: Path, pool: Pool) -> None:
    synced: list[str] = []
    fdatasync = os.fdatasync

    def watched(fd: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{fd}").rpartition("/")[2])
        fdatasync(fd)

    with mock.patch("os.fdatasync", watched):
        medium = slab(tmp_path / "x", pool, sync_seconds=1000.0)
        run(medium, pool.put(1, [(0, 1, [0])]))
        assert synced == []
        assert medium.close(30)
    assert synced == ["slab", "seals"]


def test_extents_behind_a_bad_one_are_not_begun(tmp_path: Path, pool: Pool) -> None:
    medium = slab(tmp_path / "x", pool, put_threads=1)
    job = pool.put(1, [(place, 1, [place]) for place in range(PLACES)])
    pool.bytes[4, 0] ^= 1
    assert run(medium, job).num_good == 4
    assert medium.recover().places.tolist() == [0, 1, 2, 3]
    assert medium.close(30)


# Order


def test_nothing_is_put_while_something_waits_to_be_got(tmp_path: Path, pool: Pool) -> None:
    with gate("preadv") as reads, gate("pwritev") as writes:
        medium = slab(tmp_path / "x", pool, get_threads=1, put_threads=2)
        run(medium, pool.put(1, [(0, 1, [0])]))
        reads.shut()
        medium.submit(get(2, [(0, 1, [9])]))
        medium.submit(get(3, [(0, 1, [10])]))
        wait_until(lambda: reads.num_inside == 1)
        writes.shut()
        medium.submit(pool.put(4, [(1, 4, [1]), (2, 4, [2])]))
        time.sleep(0.05)  # time enough to do what must not be done
        assert writes.num_inside == 0
        reads.open()
        wait_until(lambda: writes.num_inside == 2)
        writes.open()
        assert [end.error for end in ends(medium, 3)] == [None] * 3
        assert medium.close(30)


def test_a_place_has_one_writer_and_nobody_reads_it_meanwhile(tmp_path: Path, pool: Pool) -> None:
    with gate("pwritev") as writes, gate("preadv") as reads:
        medium = slab(tmp_path / "x", pool)
        run(medium, pool.put(1, [(0, 1, [0]), (1, 1, [1])]))
        writes.shut()
        reads.shut()
        medium.submit(pool.put(2, [(0, 2, [0])]))
        medium.submit(get(3, [(1, 1, [9]), (1, 1, [10])]))
        medium.check_invariants()
        for job, shown in [
            (pool.put(4, [(0, 4, [2])]), "written"),
            (get(5, [(0, 1, [2])]), "written"),
            (pool.put(6, [(1, 6, [2])]), "being read"),
            (pool.put(2, [(5, 6, [2])]), "under way"),
        ]:
            medium.submit(job)
            (end,) = medium.poll()
            assert end.job_id == job.job_id
            assert shown in str(end.error)
        writes.open()
        reads.open()
        assert [end.error for end in ends(medium, 2)] == [None] * 2
        assert run(medium, pool.put(7, [(0, 7, [0]), (1, 7, [1])])).num_good == 2
        medium.check_invariants()
        assert medium.close(30)


# Hangs


@pytest.mark.parametrize(("verb", "call"), [(Verb.GET, "preadv"), (Verb.PUT, "pwritev")])
def test_a_disk_that_hangs_keeps_nobody_waiting(
    tmp_path: Path, pool: Pool, caplog: pytest.LogCaptureFixture, verb: Verb, call: str
) -> None:
    with gate(call) as calls:
        medium, clock = clocked(tmp_path / "x", pool)
        assert run(medium, pool.put(1, [(place, 1, [place]) for place in range(6)])).num_good == 6
        calls.shut()

        def job(job_id: int, places: Sequence[int]) -> None:
            extents = [(place, 1, [place]) for place in places]
            newer = [(place, job_id, [place]) for place in places]
            medium.submit(get(job_id, extents) if verb is Verb.GET else pool.put(job_id, newer))

        job(2, [0, 1, 2])
        wait_until(lambda: calls.num_inside == 2)
        job(3, [4, 5])
        assert medium.poll() == []
        clock.now += 11
        assert medium.is_off
        (end,) = medium.poll()
        assert (end.job_id, end.num_good) == (3, 0)
        assert "hangs" in str(end.error)
        job(4, [4])
        (end,) = medium.poll()
        assert (end.job_id, end.num_good) == (4, 0)
        medium.check_invariants()
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        calls.open()
        (end,) = ends(medium)
        assert (end.job_id, end.num_good) == (2, 2), "what hung has ended, what had not begun has not"
        assert not medium.is_off
        job(5, [4])
        assert ends(medium)[0].num_good == 1
        assert medium.close(30)


def test_one_thread_that_hangs_leaves_the_others(tmp_path: Path, pool: Pool) -> None:
    with gate("preadv") as calls:
        medium, clock = clocked(tmp_path / "x", pool)
        run(medium, pool.put(1, [(0, 1, [0]), (1, 1, [1])]))
        calls.shut()
        medium.submit(get(2, [(0, 1, [9])]))
        wait_until(lambda: calls.num_inside == 1)
        clock.now += 1000
        real = os.preadv
        with mock.patch("os.preadv", calls._call):
            assert run(medium, get(3, [(1, 1, [10])])).num_good == 1
        assert os.preadv is real
        assert not medium.is_off
        calls.open()
        assert ends(medium)[0].num_good == 1
        assert medium.close(30)


def test_closing_does_not_wait_for_what_hangs(tmp_path: Path, pool: Pool) -> None:
    with gate("pwritev") as calls:
        medium = slab(tmp_path / "x", pool, put_threads=1)
        calls.shut()
        medium.submit(pool.put(1, [(0, 1, [0]), (1, 1, [1])]))
        medium.submit(pool.put(2, [(2, 2, [2])]))
        wait_until(lambda: calls.num_inside == 1)
        assert not medium.close(0.01)
        (end,) = medium.poll()
        assert (end.job_id, end.num_good) == (2, 0)
        assert not medium.close(0.01)
        calls.open()
        (end,) = ends(medium)
        assert (end.job_id, end.num_good) == (1, 1)
        assert medium.close(30)


def test_threads_end_with_it_and_keep_no_process_alive(tmp_path: Path, pool: Pool) -> None:
    def threads() -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread.name.startswith("kv-offload-slab")]

    medium = slab(tmp_path / "x", pool, get_threads=3, put_threads=2)
    assert len(threads()) == 6
    assert all(thread.daemon for thread in threads())
    assert medium.close(30)
    wait_until(lambda: not threads())
