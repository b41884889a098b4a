"""Ranks that share a pool: what each maps, which part each fills, and that none waits for one that failed."""

import ctypes
import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload import HostMemoryError
from offload.messages import LOAD, STORE, Fingerprint, WorkerFacts
from offload.testing.copiers.faulty import Fault, FaultyCopier
from offload.testing.copiers.inline import InlineCopier, InlineExecutor
from offload.testing.virtual.meeting import Meeting
from offload.vllm.replicas import Shape
from offload.worker import replicas as module
from offload.worker.jobs import TransferEnd
from offload.worker.lanes import gpu_lanes
from offload.worker.layout import BlockLayout, Region
from offload.worker.pool.memory import HostMemory
from offload.worker.pool.segment import Segment
from offload.worker.replicas import ALONE, Replicas, Share, Sharing, share_pool
from offload.worker.seals import Seals
from offload.worker.transfer import DEADLINE_SECONDS, TransferEngine
from tests.shared_memory import files_of_ours
from tests.strategies import thorough

SLOT_BYTES = 48
NUM_SLOTS = 300
FACTS = WorkerFacts(NUM_SLOTS, SLOT_BYTES, Fingerprint("", "", 2, 16, "", ""))
FORK = multiprocessing.get_context("fork")


@given(num_parts=st.integers(1, 5), job_id=st.integers(0, 100), num_blocks=st.integers(0, 40))
@thorough(200)
def test_parts_of_a_job_are_all_of_it(num_parts: int, job_id: int, num_blocks: int) -> None:
    parts = [Share(part, num_parts).of(job_id, num_blocks) for part in range(num_parts)]
    parts.sort(key=lambda part: (part.start, part.stop))
    assert [block for part in parts for block in part] == list(range(num_blocks))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


@pytest.mark.parametrize("num_parts", [1, 2, 3])
def test_ranks_take_turns_with_jobs_of_one_block(num_parts: int) -> None:
    jobs = [[part for part in range(num_parts) if Share(part, num_parts).of(job, 1)] for job in range(9)]
    assert all(len(whose) == 1 for whose in jobs)
    assert {whose[0] for whose in jobs[-num_parts:]} == set(range(num_parts))


def on_all(num_ranks: int, shape: Shape, work: Callable[[Replicas], Any]) -> list[Any]:
    """What that comes to on each rank, or the error."""
    meeting = Meeting(num_ranks, 1)

    def tried(place: int) -> Any:
        replicas = meeting.join(place)(shape)
        assert replicas is not None
        try:
            return work(replicas)
        except Exception as error:
            return error

    with ThreadPoolExecutor(num_ranks) as threads:
        return list(threads.map(tried, range(num_ranks)))


_of_others: set[str] = set()


@pytest.fixture(autouse=True)
def segments_of_others() -> None:
    """What other tests of this process have left mapped is none of ours."""
    _of_others.clear()
    _of_others.update(open_segments())


def open_segments() -> list[str]:
    """Segments of this process that are mapped or open, and were not before the test."""
    found = [line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:kv-offload" in line]
    for descriptor in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            found += [name] if "memfd:kv-offload" in (name := os.readlink(descriptor)) else []
    return [each for each in found if each not in _of_others]


@pytest.mark.parametrize(("num_ranks", "size"), [(2, 2), (4, 2), (3, 3)])
def test_members_see_the_same_slots_and_seals_and_others_do_not(num_ranks: int, size: int) -> None:
    pools: list[Sharing] = on_all(num_ranks, Shape(size), lambda replicas: share_pool(replicas, FACTS))
    memories = [HostMemory(NUM_SLOTS, SLOT_BYTES, shared=pool.slots) for pool in pools]
    assert len({memory.address for memory in memories}) == num_ranks
    for rank, (memory, pool) in enumerate(zip(memories, pools, strict=True)):
        assert pool.share == Share(rank % size, size)
        assert pool.tables is not None and (pool.tables.fills[rank::num_ranks] == -1).all()
        ctypes.memset(memory.address + rank, 1 + rank, 1)
        pool.tables.fills[rank], pool.tables.sums[rank] = rank, rank
    for rank, (memory, pool) in enumerate(zip(memories, pools, strict=True)):
        first = rank // size * size
        theirs = [1 + other if first <= other < first + size else 0 for other in range(num_ranks)]
        assert list(ctypes.string_at(memory.address, num_ranks)) == theirs
        assert pool.tables is not None
        assert pool.tables.fills[:num_ranks].tolist() == [each - 1 for each in theirs]
        assert pool.tables.sums[:num_ranks].tolist() == [max(each - 1, 0) for each in theirs]
    for memory in memories:
        memory.close()
    del pools, pool, memories, memory
    assert open_segments() == []


def test_each_member_takes_its_part_of_the_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[tuple[int, int, Any]] = []

    def take(address: int, nbytes: int, *, node: Any, huge_pages: bool, is_shared: bool) -> None:
        assert huge_pages and is_shared
        taken.append((address, nbytes, node))

    monkeypatch.setattr(module, "take_pages", take)
    facts = WorkerFacts(1000, 4096, FACTS.fingerprint)
    pools = on_all(
        3, Shape(3), lambda replicas: share_pool(replicas, facts, node=replicas.number, huge_pages=True)
    )
    starts = [np.frombuffer(pool.slots, dtype=np.uint8).ctypes.data for pool in pools]
    parts = sorted((address - starts[node], nbytes) for address, nbytes, node in taken)
    assert parts == [(0, 333 * 4096), (333 * 4096, 333 * 4096), (666 * 4096, 334 * 4096)]


@pytest.mark.parametrize("failing", [0, 1, 3])
@pytest.mark.parametrize("where", ["create", "map", "take_pages"])
def test_trap_75_nobody_waits_for_a_rank_that_failed(
    where: str, failing: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own error there, and one that names it on all others; nothing stays behind."""
    if where == "create" and failing % 2:
        failing -= 1  # only the first of a set makes anything
    mine = {}

    def share(replicas: Replicas) -> Sharing:
        place = replicas.members[replicas.number]
        mine[threading.get_ident()] = place
        return share_pool(replicas, FACTS)

    def failing_at(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if mine[threading.get_ident()] == failing:
                raise MemoryError("none left")
            return original(*args, **kwargs)

        return call

    if where == "take_pages":
        monkeypatch.setattr(module, where, failing_at(module.take_pages))
    else:
        monkeypatch.setattr(Segment, where, failing_at(getattr(Segment, where)))
    outcomes = on_all(4, Shape(2), share)
    for place, outcome in enumerate(outcomes):
        if place == failing:
            assert isinstance(outcome, MemoryError)
        else:
            assert isinstance(outcome, HostMemoryError)
            assert f"rank {failing} of those" in str(outcome) and "none left" in str(outcome)
    del outcomes, outcome
    assert open_segments() == []


@pytest.mark.parametrize("where", ["create", "open", "map"])
def test_who_cannot_share_has_memory_of_its_own(
    where: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Only the set concerned, with one line in the log."""
    places = {}
    original = getattr(Segment, where)

    def refused(*args: Any) -> Any:
        if places[threading.get_ident()] in (0, 1):
            raise PermissionError("not here")
        return original(*args)

    def share(replicas: Replicas) -> Sharing:
        places[threading.get_ident()] = replicas.members[replicas.number]
        return share_pool(replicas, FACTS)

    monkeypatch.setattr(Segment, where, refused)
    with caplog.at_level(logging.WARNING):
        pools = on_all(4, Shape(2), share)
    assert pools[:2] == [ALONE, ALONE]
    assert [pool.share for pool in pools[2:]] == [Share(0, 2), Share(1, 2)]
    [line] = caplog.messages
    assert "2 ranks hold the same KV and cannot share memory (not here)" in line


class TestSegment:
    def test_another_process_finds_it_by_name(self) -> None:
        segment = Segment.create(8192)
        mapping = segment.map(4096, 4096)
        mapping[:3] = b"abc"
        child = FORK.Process(target=_write_there, args=(segment.name,))
        child.start()
        child.join(30)
        assert child.exitcode == 0
        assert mapping[:6] == b"abcdef"
        segment.close()

    def test_a_file_that_is_not_it_is_left_alone(self, tmp_path: Path) -> None:
        segment = Segment.create(4096)
        with (
            (tmp_path / "other").open("w") as other,
            pytest.raises(OSError, match="other, not kv-offload-"),
        ):
            Segment.open(segment.name._replace(fd=other.fileno()))
        segment.close()
        with pytest.raises(FileNotFoundError):
            Segment.open(segment.name)

    @pytest.mark.parametrize("machine", ["", "another boot pid:[4026531836]"])
    def test_that_of_another_machine_is_not_looked_for(self, machine: str) -> None:
        segment = Segment.create(4096)
        with pytest.raises(OSError, match="another machine"):
            Segment.open(segment.name._replace(machine=machine))
        segment.close()

    def test_a_size_that_no_file_can_have_leaves_nothing_open(self) -> None:
        with pytest.raises(OSError, match="Invalid"):
            Segment.create(-1)
        assert open_segments() == []


def _write_there(name: Any) -> None:
    segment = Segment.open(name)
    mapping = segment.map(4096, 4096)
    assert mapping[:3] == b"abc"
    mapping[3:6] = b"def"


@pytest.fixture
def two_processes() -> Iterator[list[Any]]:
    """They share a pool and wait to be killed; the ends of pipes to them; files that were there before."""
    before = files_of_ours()
    ours, theirs = zip(*(FORK.Pipe() for _ in range(2)), strict=True)
    children = [FORK.Process(target=_share_and_wait, args=(place, theirs[place])) for place in range(2)]
    for child in children:
        child.start()
    for _ in range(3):  # what ranks say to each other
        said = [connection.recv() for connection in ours]
        for connection in ours:
            connection.send(said)
    yield [children, ours, before]
    for child in children:
        child.kill()
        child.join()


def _share_and_wait(place: int, connection: Connection) -> None:
    def exchange(mine: Any) -> list[Any]:
        connection.send(mine)
        said: list[Any] = connection.recv()
        return said

    sharing = share_pool(Replicas((0, 1), place, exchange), FACTS)
    assert sharing.slots is not None
    while True:
        at, value = connection.recv()
        if value is not None:
            sharing.slots[at] = value
        connection.send(sharing.slots[at])


def test_what_one_process_writes_another_reads(two_processes: list[Any]) -> None:
    _, (one, other), _ = two_processes
    one.send((5, 77))
    assert one.recv() == 77
    other.send((5, None))
    assert other.recv() == 77


def test_killed_processes_leave_nothing(two_processes: list[Any]) -> None:
    """Memory that is shared is gone from the machine's account of it, and /dev/shm has no file of ours."""
    children, _, before = two_processes
    names = [_segment_of(child.pid) for child in children]
    assert names[0] == names[1] != ""
    for child in children:
        os.kill(child.pid, signal.SIGKILL)
        child.join()
    assert files_of_ours() <= before
    assert not [name for name in map(_segment_of, _all_processes()) if name == names[0]]


def _segment_of(pid: int) -> str:
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            if "memfd:kv-offload" in line:
                return line.split()[-2]
    return ""


def _all_processes() -> list[int]:
    return [int(path.name) for path in Path("/proc").glob("[0-9]*")]


class Set:
    """Two ranks over one pool, each with a cache of its own that holds the same."""

    NUM_BLOCKS = 8

    def __init__(self) -> None:
        self.now = 0.0
        self.pool = np.zeros((self.NUM_BLOCKS, 4), dtype=np.uint8)
        kv = np.arange(4 * self.NUM_BLOCKS, dtype=np.uint8).reshape(-1, 4)
        self.caches = [kv.copy(), kv.copy()]
        tables = module.SealTables.of_one(self.NUM_BLOCKS)
        self.faults = [Fault.NONE, Fault.NONE]
        self.copiers = [
            FaultyCopier(InlineCopier(), lambda job_id, route, rank=rank: self.faults[rank])  # type: ignore[misc]
            for rank in range(2)
        ]
        self.engines = []
        for rank, (cache, copier) in enumerate(zip(self.caches, self.copiers, strict=True)):
            layout = BlockLayout([Region(cache.ctypes.data, 4, 4)], self.pool.ctypes.data)
            seals = Seals(layout, self.NUM_BLOCKS, of_blocks=True, tables=tables)
            self.engines.append(
                TransferEngine(
                    gpu_lanes(layout, copier),
                    seals,
                    clock=lambda: self.now,
                    make_executor=InlineExecutor,
                    share=Share(rank, 2),
                )
            )

    def store(self, job_id: int, num_blocks: int = 8) -> list[list[TransferEnd]]:
        ids = np.arange(num_blocks)
        for engine in self.engines:
            engine.submit(job_id, STORE, ids, ids)
        return self.poll()

    def load(self, fill: int) -> list[list[TransferEnd]]:
        ids = np.arange(self.NUM_BLOCKS)
        for engine, cache in zip(self.engines, self.caches, strict=True):
            cache[:] = 0
            engine.submit(100, LOAD, ids, ids, np.full(self.NUM_BLOCKS, fill))
        return self.poll()

    def poll(self) -> list[list[TransferEnd]]:
        ends = [engine.poll() for engine in self.engines]
        for engine in self.engines:
            engine.check_invariants()
        return ends


def test_each_copies_its_part_and_all_load_all() -> None:
    ranks = Set()
    expected = ranks.caches[0].copy()
    [[one], [other]] = ranks.store(6)
    assert (one.num_good, other.num_good, one.error, other.error) == (8, 8, None, None)
    assert one.nbytes == other.nbytes == 16
    assert (ranks.pool == expected).all()
    [[one], [other]] = ranks.load(6)
    assert (one.num_good, other.num_good, one.nbytes, other.nbytes) == (8, 8, 32, 32)
    assert all((cache == expected).all() for cache in ranks.caches)


@pytest.mark.parametrize("job_id", [6, 7], ids=["in turn", "the other way round"])
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(
    ("fault", "num_own"),
    [
        (Fault.REFUSE, 0),
        (Fault.FAIL, 0),
        (Fault.STOP_HALFWAY, 0),
        (Fault.STUCK, None),
        (Fault.WRONG_BYTES, 4),
    ],
)
def test_a_part_that_fails_is_told_in_blocks_of_the_whole_job(
    job_id: int, rank: int, fault: Fault, num_own: int | None
) -> None:
    """Neighbouring blocks are one copy here, so that half of a part is none of it."""
    ranks = Set()
    ranks.faults[rank] = fault
    start = Share(rank, 2).of(job_id, 8).start
    ends = ranks.store(job_id)
    if num_own is None:
        assert ends[rank] == []
        ranks.now = DEADLINE_SECONDS + 1
        [end] = ranks.poll()[rank]
        assert (end.num_good, end.is_over) == (0, False)
        ranks.copiers[rank].let_go()
        [end] = ranks.poll()[rank]
        assert (end.num_good, end.is_over) == (0, True)
    else:
        [end] = ends[rank]
        assert end.num_good == (8 if num_own == 4 else start + num_own)
        assert (end.error is None) == (num_own == 4)
    [fine] = ends[1 - rank]
    assert (fine.num_good, fine.error) == (8, None)
    ranks.faults[rank] = Fault.NONE
    for [end] in ranks.load(job_id):
        assert end.num_good < 8 and end.error is not None, "what one rank did not seal no rank may load"


def test_a_job_with_nothing_for_a_rank_is_done_there() -> None:
    ranks = Set()
    ranks.faults = [Fault.FAIL, Fault.FAIL]
    [[one], [other]] = ranks.store(6, num_blocks=1)
    assert sorted([one.num_good, other.num_good]) == [0, 1]
    assert [end.nbytes for end in (one, other)] == [0, 0]


def test_a_rank_that_is_late_takes_no_seal_of_another_away() -> None:
    ranks = Set()
    ids = np.arange(8)
    ranks.engines[0].submit(6, STORE, ids, ids)
    assert [end.num_good for end in ranks.engines[0].poll()] == [8]
    ranks.engines[1].submit(6, STORE, ids, ids)
    assert [end.num_good for end in ranks.engines[1].poll()] == [8]
    assert [end.num_good for [end] in ranks.load(6)] == [8, 8]


def test_a_load_notices_that_another_rank_fills_its_slots_again() -> None:
    """Which the scheduler's side never lets happen."""
    ranks = Set()
    ranks.store(6)
    ids = np.arange(8)
    ranks.copiers[1].holding = True
    ranks.engines[1].submit(7, LOAD, ids, ids, np.full(8, 6))
    ranks.engines[0].submit(8, STORE, ids, ids)
    ranks.copiers[1].holding = False
    [end] = ranks.engines[1].poll()
    assert end.num_good == Share(0, 2).of(8, 8).start
    assert end.error is not None and "filled by another store" in end.error
