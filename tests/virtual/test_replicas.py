"""Ranks that hold the same KV, on vLLM's real scheduler: one copy, each stores a part, all load all."""

import random
from collections.abc import Callable, Mapping
from dataclasses import replace

import pytest

from offload.messages import LOAD, STORE
from offload.settings import GIB
from offload.testing.copiers.faulty import Fault
from offload.testing.virtual import VirtualEngine, draw_kind, draw_settings, run_seed
from offload.testing.virtual.drawing import with_drafts
from offload.vllm.replicas import replica_shape
from offload.worker.jobs import TransferEnd
from offload.worker.transfer import DEADLINE_SECONDS
from tests.virtual.driver import (
    Counts,
    Engines,
    come_to_rest,
    depth_of,
    finish,
    forget_gpu,
    hold,
    release,
    serve,
    step_until,
    tokens,
    warm,
    watch,
)

BLOCKS = 12
PROMPT = tokens(4 * BLOCKS)

SHAPES: dict[str, Mapping[str, int]] = {
    "two ranks": {"num_ranks": 2, "replicas": 2},
    "three ranks": {"num_ranks": 3, "replicas": 3},
    "pcp": {"num_ranks": 2, "pcp": 2},
    "pcp of two ranks": {"num_ranks": 4, "pcp": 2, "replicas": 2},
    "two sets": {"num_ranks": 6, "replicas": 3},
    "two stages": {"num_ranks": 4, "stages": 2, "replicas": 2},
}
ANY_SHAPE = pytest.mark.parametrize("shape", SHAPES.values(), ids=list(SHAPES))
TWO = SHAPES["two ranks"]

ENDING = [Fault.REFUSE, Fault.FAIL, Fault.STOP_HALFWAY, Fault.END_SHORT]


def gib_of(engine: VirtualEngine) -> float:
    """The memory that this engine was configured with."""
    config = engine.scheduler.connector._config
    return float(config.cpu_gib)


@ANY_SHAPE
def test_trap_73_and_79_who_holds_the_same_is_found(engines: Engines, shape: dict[str, int]) -> None:
    engine = engines(**shape)
    connectors = [rank.connector for rank in engine.ranks]
    found = {replica_shape(each._vllm_config, each._kv_cache_config) for each in connectors}
    assert found == {engine.settings.replica_shape}
    size = engine.settings.replica_shape.tensor * engine.settings.replica_shape.prefill
    assert {rank.side.facts.num_sharing for rank in engine.ranks if rank.side} == {size}
    come_to_rest(engine)


@pytest.mark.parametrize("shape", [SHAPES[name] for name in ("two ranks", "three ranks", "pcp", "two sets")])
def test_in_the_same_memory_are_so_many_times_the_blocks(engines: Engines, shape: dict[str, int]) -> None:
    """As many as there are ranks in a set, and they hold that many prompts."""
    alone = engines(num_ranks=shape["num_ranks"], cpu_slots=24)
    size = shape.get("replicas", 1) * shape.get("pcp", 1)
    engine = engines(**shape, cpu_slots=24 * size, gpu_blocks=40)
    assert gib_of(engine) == gib_of(alone)
    assert (alone.side.allocator.capacity, engine.side.allocator.capacity) == (24, 24 * size)
    pool_bytes = engine.side.metrics.take()["pool_bytes"]
    assert pool_bytes == alone.side.metrics.take()["pool_bytes"] == gib_of(alone) * GIB
    for first in range(2 * size):
        serve(engine, tokens(4 * BLOCKS, first + 1))
    assert engine.side.allocator.num_resident == 24 * size
    come_to_rest(engine)


@ANY_SHAPE
@pytest.mark.parametrize("block_outermost", [False, True], ids=["layers", "blocks"])
def test_trap_74_each_stores_its_part_and_loads_all(
    engines: Engines, shape: dict[str, int], block_outermost: bool
) -> None:
    engine = engines(**shape, block_outermost=block_outermost, chunk=4 * BLOCKS)
    size = len(
        [rank for rank in engine.ranks if engine.settings.first_replica(engine.ranks.index(rank)) == 0]
    )
    totals = Counts(engine)
    serve(engine, PROMPT)
    of_rank = [rank.side.facts.slot_bytes * BLOCKS for rank in engine.ranks if rank.side is not None]
    assert [copier.copied[STORE] * size for copier in engine.copiers] == of_rank
    forget_gpu(engine)
    computed = watch(engine)
    again = serve(engine, PROMPT)
    assert computed[again.request_id] == 1
    assert [copier.copied[LOAD] for copier in engine.copiers] == of_rank
    assert totals["loaded_bytes"] == totals["route_bytes:pool_to_gpu"] == sum(of_rank)
    assert totals["stored_bytes"] == totals["route_bytes:gpu_to_pool"] == sum(of_rank) // size
    come_to_rest(engine)


def test_blocks_of_an_answer_are_stored_by_turns(engines: Engines) -> None:
    """A job of one block is one rank's, of another rank each time."""
    engine = engines(**TWO, answer_run=1)
    request = serve(engine, tokens(8), 33)
    assert depth_of(engine, request) == 10
    one, other = (copier.copied[STORE] for copier in engine.copiers)
    assert one == other
    come_to_rest(engine)


@ANY_SHAPE
def test_nothing_is_offered_before_the_last_part_is_there(engines: Engines, shape: dict[str, int]) -> None:
    engine = engines(**shape, gpu_blocks=60)
    hold(engine, STORE, len(engine.ranks) - 1)
    first = finish(engine, PROMPT)
    for _ in range(5):
        engine.step()
    assert engine.jobs and depth_of(engine, first) == 0
    computed = watch(engine)
    second = finish(engine, [*PROMPT, *PROMPT[:3]])
    assert computed[second.request_id] and not engine.counts["loads"]
    release(engine)
    come_to_rest(engine)
    assert depth_of(engine, first) == BLOCKS


@ANY_SHAPE
@pytest.mark.parametrize("fault", ENDING)
def test_a_part_that_fails_fails_the_store_and_costs_a_miss(
    engines: Engines, shape: dict[str, int], fault: Fault
) -> None:
    engine = engines(**shape, chunk=48)
    hold(engine, STORE)
    engine.copiers[-1].force(STORE, fault)
    request = engine.add(PROMPT, 1)
    step_until(engine, request.is_finished)
    release(engine)
    step_until(engine, lambda: not engine.jobs)
    assert engine.counts[f"store {fault.name.lower()}"] == 1
    come_to_rest(engine)
    forget_gpu(engine)
    again = serve(engine, PROMPT, 3)
    assert again.num_output_tokens == 3 and depth_of(engine, again) == BLOCKS, "it was stored anew"


@ANY_SHAPE
@pytest.mark.parametrize("fault", [*ENDING, Fault.WRONG_BYTES])
def test_a_load_that_fails_on_one_rank_is_computed_from_there(
    engines: Engines, shape: dict[str, int], fault: Fault
) -> None:
    engine = engines(**shape, first_part=16)
    warm(engine, PROMPT)
    engine.copiers[-1].force(LOAD, fault)
    computed = watch(engine)
    victim = serve(engine, PROMPT, 2)
    assert computed[victim.request_id] > 2
    forget_gpu(engine)
    assert depth_of(engine, serve(engine, PROMPT)) == BLOCKS
    come_to_rest(engine)


@ANY_SHAPE
def test_a_part_that_hangs_keeps_its_slots_and_no_request(engines: Engines, shape: dict[str, int]) -> None:
    engine = engines(**shape, chunk=48)
    engine.copiers[-1].force(STORE, Fault.STUCK)
    request = finish(engine, PROMPT)
    step_until(engine, engine.is_idle, int(DEADLINE_SECONDS) + 20)
    allocator = engine.side.allocator
    assert (depth_of(engine, request), allocator.num_filling) == (0, BLOCKS)
    for _ in range(2):  # on trial a single block, then the others
        forget_gpu(engine)
        finish(engine, PROMPT)
        step_until(engine, engine.is_idle)
    assert (allocator.num_filling, allocator.num_resident) == (BLOCKS, BLOCKS), "stored beside it"
    come_to_rest(engine)
    assert allocator.num_filling == 0


def watch_loads(engine: VirtualEngine) -> dict[int, int]:
    """Good blocks of the last load, by rank."""
    num_good: dict[int, int] = {}

    def watched(index: int, poll: Callable[[], list[TransferEnd]]) -> Callable[[], list[TransferEnd]]:
        def polled() -> list[TransferEnd]:
            ends = poll()
            num_good.update((index, end.num_good) for end in ends if end.route == LOAD)
            return ends

        return polled

    for index, rank in enumerate(engine.ranks):
        assert rank.side is not None and rank.side._engine is not None
        transfers = rank.side._engine
        transfers.poll = watched(index, transfers.poll)  # type: ignore[method-assign]
    return num_good


@ANY_SHAPE
@pytest.mark.parametrize("position", [1, BLOCKS - 2], ids=["first part", "last part"])
@pytest.mark.parametrize("of_blocks", [False, True], ids=["slots", "blocks"])
def test_a_slot_that_rots_is_found_by_every_rank(
    engines: Engines, shape: dict[str, int], position: int, of_blocks: bool
) -> None:
    """Also by those that have not sealed it."""
    engine = engines(**shape, seals_of_blocks=of_blocks, chunk=4 * BLOCKS)
    warm(engine, PROMPT)
    request = engine.add(PROMPT, 1)
    engine.abort(request.request_id)
    slots = engine.side.allocator.lookup(request.block_hashes).slots[:, 0].tolist()
    engine.ranks[0].rot(slots[position], offset=17)
    computed, num_good = watch(engine), watch_loads(engine)
    victim = serve(engine, PROMPT)
    assert computed[victim.request_id] == 4 * (BLOCKS - position)
    of_set = [rank for rank in num_good if engine.settings.first_replica(rank) == 0]
    assert len(of_set) > 1 and {num_good[rank] for rank in of_set} == {position}
    assert all(num_good[rank] == BLOCKS for rank in num_good if rank not in of_set)
    come_to_rest(engine)


@pytest.mark.parametrize("fault", [Fault.WRONG_BYTES, Fault.NONE])
def test_bytes_that_one_rank_stored_wrong_reach_no_other(engines: Engines, fault: Fault) -> None:
    """Its checksum is of what it should have stored; the other one compares."""
    engine = engines(**TWO)
    engine.copiers[0].force(STORE, fault)
    warm(engine, PROMPT)
    computed = watch(engine)
    again = serve(engine, PROMPT, 2)
    assert (computed[again.request_id] > 2) == (fault is Fault.WRONG_BYTES)
    come_to_rest(engine)


def test_a_reset_forgets_what_all_have_stored(engines: Engines) -> None:
    engine = engines(**TWO, gpu_blocks=60)
    warm(engine, PROMPT)
    hold(engine, LOAD, 1)
    request = engine.add(PROMPT, 2)
    for _ in range(4):
        engine.step()
    engine.reset()
    release(engine)
    step_until(engine, request.is_finished)
    come_to_rest(engine)
    assert serve(engine, PROMPT, 2).num_output_tokens == 2


@pytest.mark.parametrize("first", range(0, 24, 8))
def test_random_runs(first: int) -> None:
    """Any shape, with faults on any rank, aborts, preemptions, resets and rot."""
    for seed in range(5000 + first, 5008 + first):
        run_seed(seed, turns=150, kind="replica")


@ANY_SHAPE
@pytest.mark.parametrize("overlapped", [False, True], ids=["step by step", "overlapped"])
def test_random_runs_of_each_shape(shape: dict[str, int], overlapped: bool) -> None:
    num_loads = 0
    for seed in range(5100, 5103):
        settings = draw_settings(random.Random(seed), overlapped=overlapped)
        num_loads += run_seed(seed, 150, replace(settings, **{"dcp": 1} | shape)).counts["loads"]
    assert num_loads


def test_random_runs_with_drafts() -> None:
    """Draft layers hold the same on all ranks, too."""
    for seed in range(5200, 5206):
        rng = random.Random(seed)
        settings = with_drafts(draw_kind("replica", seed, rng), rng)
        run_seed(seed, turns=150, settings=settings)
