"""What happens on a worker while vLLM's step takes long: a load goes on behind the fetch that it follows."""

import ctypes
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from offload.messages import LOAD, POOL, Extents, Route
from offload.store_config import StoreAddress
from offload.worker.copiers.cpu import CpuCopier
from offload.worker.elsewhere import Elsewhere
from offload.worker.jobs import TransferJob
from offload.worker.lanes import gpu_lanes
from offload.worker.layout import BlockLayout, Region
from offload.worker.media.base import Medium
from offload.worker.media.lane import PoolParts, medium_lanes
from offload.worker.media.resp_medium import RespMedium
from offload.worker.media.store_names import Whose
from offload.worker.pump import Pump
from offload.worker.replicas import Share
from offload.worker.seals import Seals, SealTables
from offload.worker.transfer import TransferEngine
from tests.offload.worker.media.bench import EXTENT, SLOTS, Pool, ids, run, slab, wait_until
from tests.stores import REDIS, StoreServer

SPILL, FETCH = Route("spill", POOL, "disk"), Route("fetch", "disk", POOL)
NUM_BLOCKS = 2 * EXTENT
NAMES = np.frombuffer(b"A" * 32 + b"B" * 32, dtype=np.uint8).reshape(2, 32)


def over_slab(path: Path, pool: Pool) -> tuple[Medium, int]:
    """A slab on a disk, and its epoch."""
    medium = slab(path / "slab", pool)
    return medium, medium.epoch


def over_store(path: Path, pool: Pool) -> tuple[Medium, int]:
    """A real store, which ends with the medium."""
    server = StoreServer(REDIS, path)
    whose = Whose("model and layout", "0 of 1")
    return StoreMedium(server, StoreAddress.of(server.url), pool.slots, whose=whose, extent_slots=EXTENT), 1


class StoreMedium(RespMedium):
    """One with a server of its own."""

    def __init__(self, server: StoreServer, *arguments: Any, **more: Any) -> None:
        super().__init__(*arguments, **more)
        self._server = server

    def close(self, seconds: float) -> bool:
        is_closed = super().close(seconds)
        self._server.kill()
        return is_closed


class Worker:
    """A pool over a medium that has two extents, a GPU cache in host memory, and what moves between them."""

    def __init__(
        self,
        make: Callable[[Path, Pool], tuple[Medium, int]],
        path: Path,
        share: Share = Share(),  # noqa: B008 (immutable)
    ) -> None:
        self.pool = Pool()
        memory = self.pool.slots
        self.medium, epoch = make(path, self.pool)
        slots = list(range(NUM_BLOCKS))
        put = self.pool.put(1, [(0, 1, slots[:EXTENT]), (1, 1, slots[EXTENT:])], epoch=epoch)
        put = replace(put, names=NAMES, depths=ids(0, 1))
        assert run(self.medium, put).error is None
        self.kept = self.pool.read(slots)
        self.generations = put.generations
        self.pool.fill(slots)
        self.cache = (ctypes.c_uint8 * (NUM_BLOCKS * memory.slot_bytes))()
        region = Region(ctypes.addressof(self.cache), memory.slot_bytes, memory.slot_bytes)
        self.layout = BlockLayout([region], memory.address)
        tables = SealTables.of_one(SLOTS)
        seals, self.others = (Seals(self.layout, SLOTS, tables=tables, for_others=True) for _ in range(2))
        lanes = gpu_lanes(self.layout, CpuCopier())
        lanes += medium_lanes(SPILL, FETCH, self.medium, PoolParts(memory, seals, share))
        self.engine = TransferEngine(lanes, seals, share=share)

    def fetch_and_load(self) -> None:
        """Jobs 7 and 8, and load 9 of both."""
        slots = np.arange(NUM_BLOCKS)
        for number, job_id in enumerate((7, 8)):
            one = slice(number, number + 1)
            extents = Extents(ids(number), self.generations[one], ids(0, EXTENT), ids(0), NAMES[one])
            part = slots[number * EXTENT : (number + 1) * EXTENT]
            self.engine.submit(job_id, FETCH, np.full(EXTENT, number), part, None, extents)
        fills = np.repeat([7, 8], EXTENT)
        self.engine.submit(9, LOAD, slots, np.arange(NUM_BLOCKS), fills)

    @property
    def has_all(self) -> bool:
        """Whether the cache holds what was put."""
        return bytes(self.cache) == self.kept


@pytest.fixture(params=[over_slab, over_store])
def worker(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Worker]:
    worker = Worker(request.param, tmp_path)
    yield worker
    assert worker.engine.close(10.0)


def test_a_load_goes_on_behind_its_fetch_though_nobody_polls(worker: Worker) -> None:
    worker.fetch_and_load()
    wait_until(lambda: worker.has_all)
    found = {}
    while len(found) < 3:
        found |= {end.job_id: end.error for end in worker.engine.poll()}
        worker.engine.check_invariants()
    assert found == dict.fromkeys((7, 8, 9))


@pytest.mark.parametrize(("rank", "job_id"), [(0, 7), (1, 8)])
def test_other_ranks_see_what_has_failed_here(rank: int, job_id: int, tmp_path: Path) -> None:
    """What lies there is not what was asked for, so they need not wait. Each fetches one extent of two."""
    worker = Worker(over_slab, tmp_path, Share(rank, 2))
    worker.generations = worker.generations + 1
    worker.fetch_and_load()
    slots = np.arange(rank * EXTENT, (rank + 1) * EXTENT)
    wait_until(lambda: any(end.job_id == job_id for end in worker.engine.poll()))
    assert not worker.others.num_current(slots, np.full(EXTENT, job_id))
    assert all(worker.others.has_failed(job_id, slot) for slot in slots.tolist())
    assert worker.engine.close(10.0)


def test_another_rank_s_load_does_not_wait_for_what_has_failed_here(tmp_path: Path) -> None:
    worker = Worker(over_slab, tmp_path, Share(0, 2))
    worker.generations = worker.generations + 1
    elsewhere, slots = Elsewhere(worker.others, 1e9), np.arange(EXTENT)
    elsewhere.began(7, 0.0)
    lane = next(lane for lane in gpu_lanes(worker.layout, CpuCopier()) if lane.route == LOAD)
    elsewhere.wait(9, TransferJob(lane, slots, slots, 0.0, np.full(EXTENT, 7), None, slots, EXTENT))
    assert elsewhere.over() == []
    worker.fetch_and_load()
    wait_until(lambda: any(end.job_id == 7 for end in worker.engine.poll()))
    assert elsewhere.over() == [9]
    assert worker.engine.close(10.0)


def test_a_load_goes_on_behind_what_another_rank_fetches_though_nobody_polls(tmp_path: Path) -> None:
    """Of two extents this rank fetches the first."""
    worker = Worker(over_slab, tmp_path, Share(0, 2))
    worker.fetch_and_load()
    slots = np.arange(NUM_BLOCKS)
    wait_until(lambda: worker.others.num_current(slots, np.repeat([7, 8], EXTENT)) == EXTENT)
    wait_until(lambda: 9 in worker.engine._elsewhere)
    assert not worker.has_all
    memory, theirs = worker.pool.slots, slots[EXTENT:]
    for slot, address in zip(theirs.tolist(), memory.addresses(theirs).tolist(), strict=True):
        ctypes.memmove(address, worker.kept[slot * memory.slot_bytes :], memory.slot_bytes)
    worker.others.seal(8, None, theirs)
    wait_until(lambda: worker.has_all)
    assert {end.job_id for end in worker.engine.poll()} >= {7, 8}
    assert worker.engine.close(10.0)


@pytest.mark.parametrize("seed", range(5))
def test_steps_and_the_thread_do_not_get_in_each_others_way(worker: Worker, seed: int) -> None:
    """A step polls, cancels and submits whenever it likes."""
    rng, found = np.random.default_rng(seed), list[int]()
    worker.fetch_and_load()
    is_cancelled = rng.random() < 0.5
    for _ in range(rng.integers(0, 20)):
        found += [end.job_id for end in worker.engine.poll()]
        worker.engine.check_invariants()
    if is_cancelled:
        worker.engine.cancel(9)
    wait_until(lambda: found.extend(end.job_id for end in worker.engine.poll()) or len(found) == 3)
    assert sorted(found) == [7, 8, 9]
    assert is_cancelled or worker.has_all
    assert len(worker.engine) == 0


def test_media_without_threads_have_no_pump() -> None:
    assert Pump.of([], lambda: None) is None


def test_wakes_that_come_meanwhile_are_one_call() -> None:
    calls, may_go_on, is_in = list[int](), threading.Event(), threading.Event()

    def go_on() -> None:
        calls.append(1)
        is_in.set()
        may_go_on.wait(10)

    pump = Pump(go_on)
    pump.wake()
    assert is_in.wait(10)
    for _ in range(5):
        pump.wake()
    may_go_on.set()
    wait_until(lambda: len(calls) == 2)
    pump.close()
    assert len(calls) == 2


def test_a_fault_between_steps_is_not_the_last_call(caplog: pytest.LogCaptureFixture) -> None:
    calls = list[int]()

    def go_on() -> None:
        calls.append(1)
        if len(calls) == 1:
            raise RuntimeError("the device is lost")

    pump = Pump(go_on)
    pump.wake()
    wait_until(lambda: len(calls) == 1)
    pump.wake()
    wait_until(lambda: len(calls) == 2)
    pump.close()
    assert "could not go on between steps" in caplog.text
