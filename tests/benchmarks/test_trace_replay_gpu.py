"""Is the GPU's cache above the pool as vLLM has it, and is what is found in either counted right?"""

from collections.abc import Sequence
from pathlib import Path
from random import Random

import pytest

from benchmarks.trace_replay import __main__ as trace_replay
from benchmarks.trace_replay.above import SCHEDULER
from benchmarks.trace_replay.gpu_cache import GpuCache
from benchmarks.trace_replay.replay import TraceClock
from benchmarks.trace_replay.scheduler import replay_scheduler
from benchmarks.trace_replay.two_levels import MODES, Found, make_levels
from benchmarks.trace_replay.workloads import Workload, chains_in_blocks, redrawn
from offload.observe.trace import TraceRequest
from tests.benchmarks.conftest import Refusal, Run
from tests.benchmarks.test_trace_replay import conversations, request, write

GPU_BLOCKS = 20
WINDOW = 0.1
Chain = Sequence[bytes]


def chains_of(seed: int, turns: int = 120) -> list[list[bytes]]:
    return chains_in_blocks(list(conversations(seed, turns=turns)), 512)


def served(mode: str, chains: Sequence[Chain], gpu_blocks: int, pool_blocks: int) -> Found:
    levels = make_levels(mode, gpu_blocks, pool_blocks, WINDOW, TraceClock())
    for each in chains:
        levels.serve(each)
        levels.check_invariants()
    return levels.found


@pytest.mark.parametrize("seed", range(3))
def test_vllms_block_pool_has_the_same(seed: int) -> None:
    """Block by block: without a connector vLLM's real scheduler finds what the model finds."""
    chains = chains_of(seed)
    for gpu_blocks in (9, GPU_BLOCKS):
        real = replay_scheduler(chains, gpu_blocks, 0, 512)
        model = served("eager", chains, gpu_blocks, 1)
        assert 0 < real.on_gpu == model.on_gpu
        assert real.accessed == model.accessed


@pytest.mark.parametrize("seed", range(3))
def test_vllms_scheduler_and_the_connector_find_nearly_the_same(seed: int) -> None:
    chains = chains_of(seed)
    real = replay_scheduler(chains, GPU_BLOCKS, 2 * GPU_BLOCKS, 512)
    model = served("eager", chains, GPU_BLOCKS, 2 * GPU_BLOCKS)
    assert real.in_pool > 0
    difference = real.on_gpu + real.in_pool - model.on_gpu - model.in_pool
    assert abs(difference) <= 0.02 * real.accessed


def documents(num: int, num_blocks: int) -> list[list[bytes]]:
    each = [range(100 * number, 100 * number + num_blocks) for number in range(1, num + 1)]
    return chains_in_blocks([request(0.0, *ids) for ids in each], 512)


FITTING = documents(40, 8)
"""They fit both together, and neither alone, where these have 200 blocks each."""


@pytest.mark.parametrize("seed", range(2))
def test_vllms_scheduler_finds_more_where_the_connector_stores_lazily(seed: int) -> None:
    random = Random(seed)
    asked = [random.choice(FITTING) for _ in range(160)]
    real = {store: replay_scheduler(asked, 200, 200, 512, store) for store in ("eager", "lazy")}
    eager, lazy = (each.on_gpu + each.in_pool for each in real.values())
    assert lazy > 1.2 * eager > 0
    assert real["eager"].stored == served("eager", asked, 200, 200).stored
    assert real["lazy"].stored > 0


def test_in_turn_they_are_found_no_less_than_where_it_stores_at_once() -> None:
    """A slot for one is a slot less for another, which comes back as surely."""
    asked = FITTING * 4
    real = {store: replay_scheduler(asked, 200, 200, 512, store) for store in ("eager", "lazy")}
    assert real["lazy"].in_pool >= real["eager"].in_pool > 0
    assert real["eager"].stored == served("eager", asked, 200, 200).stored


@pytest.mark.parametrize(("gpu_blocks", "pool_blocks"), [(144, 480), (256, 256)])
def test_what_does_not_fit_in_a_cycle_is_not_copied_for_nothing(gpu_blocks: int, pool_blocks: int) -> None:
    """From the first pass on, while the policy learns; and as much is found as is of stores at once."""
    asked = documents(64, 16) * 4
    eager, auto = (
        replay_scheduler(asked, gpu_blocks, pool_blocks, 512, store) for store in ("eager", "auto")
    )
    assert auto.in_pool >= 0.9 * eager.in_pool > 0
    assert auto.stored - eager.stored < 0.15 * auto.accessed


def test_who_owns_what_on_the_gpu() -> None:
    """Chains that part and meet again: each block belongs to the last request that used it."""
    random, gpu = Random(5), GpuCache(12)
    chains = chains_in_blocks(
        [request(0.0, 1, *ids) for ids in ((2, 3, 4), (2, 5), (6, 7, 8, 9), (2, 3, 5))], 512
    )
    used: dict[bytes, int] = {}  # when, and tails first: the slow way to the same
    for turn in range(500):
        chain = random.choice(chains)
        depth = gpu.depth(chain)
        assert depth == sum(each in used for each in chain)
        run = gpu.touch(chain, depth)
        for place, each in enumerate(chain[:depth]):
            used[each] = 100 * turn - place
        num_new = len(chain) - depth
        num_lacking = num_new - gpu.num_free
        gpu.evict(num_lacking)
        for each in sorted(used, key=used.__getitem__)[: max(0, num_lacking)]:
            del used[each]
        gpu.extend(run, num_new)
        for place, each in enumerate(chain):
            used[each] = 100 * turn - place
        gpu.check_invariants()
        assert len(gpu) == len(used)


def test_three_documents_that_fit_both_together() -> None:
    """Copied at once the pool has what the GPU has, too; without that both have all three."""
    documents = [request(0.0, *range(10 * number, 10 * number + 4)) for number in (1, 2, 3)]
    asked = chains_in_blocks(documents, 512) * 4
    found = {mode: served(mode, asked, 8, 6) for mode in MODES}
    assert {each.on_gpu for each in found.values()} == {0}
    assert found["eager"].in_pool < found["lazy"].in_pool < found["hollow"].in_pool
    assert found["hollow"].in_pool == found["once"].in_pool == 4 * 3 * 3


def test_what_the_gpu_keeps_is_not_copied() -> None:
    documents = [request(0.0, *range(10 * number, 10 * number + 4)) for number in (1, 2, 3)]
    asked = chains_in_blocks(documents, 512) * 4
    found = {mode: served(mode, asked, 16, 8) for mode in MODES}
    assert {each.on_gpu for each in found.values()} == {4 * 3 * 3}
    assert found["lazy"].stored == found["hollow"].stored == 0 < found["eager"].stored


@pytest.mark.parametrize("seed", range(3))
def test_modes_differ_in_the_pool_alone(seed: int) -> None:
    chains = chains_of(seed)
    found = {mode: served(mode, chains, GPU_BLOCKS, GPU_BLOCKS) for mode in MODES}
    assert len({(each.accessed, each.on_gpu) for each in found.values()}) == 1
    assert found["eager"].in_pool < found["lazy"].in_pool
    assert found["eager"].in_pool < found["hollow"].in_pool
    assert found["eager"].in_pool < found["once"].in_pool
    assert all(each.stored > 0 for mode, each in found.items() if mode != "once")


def test_a_prompt_as_large_as_the_gpus_cache() -> None:
    """Its own blocks go before it is over; nothing is lost of what came before it."""
    a, b = chains_in_blocks([request(0.0, *range(1, 9)), request(0.0, *range(11, 19))], 512)
    for mode in MODES:
        found = served(mode, [a, b, a], 8, 16)
        assert found.on_gpu + found.in_pool == 8, mode


def test_rows_and_table(tmp_path: Path, run: Run) -> None:
    path = write(tmp_path / "a_trace.jsonl", list(conversations(0, turns=40)))
    sizes = ["--gpu", "0.1,0.5", "--gpu-pools", "1,3", "--gpu-window", "0.1,0.3", "--draws", "1"]
    found, meta, out, _ = run(trace_replay, "--trace", str(path), *sizes, "--gpu-scheduler")
    assert meta["settings"]["gpu"] == [0.1, 0.5] and "of the gap" in out
    places = {(row["trace"], row["gpu_blocks"], row["pool_times"]) for row in found}
    assert len(places) == 2 * 2 * 2
    assert {name for name, _, _ in places} == {"a", "a, draw 1"}
    for place in places:
        rows = [row for row in found if (row["trace"], row["gpu_blocks"], row["pool_times"]) == place]
        assert [(row["mode"], row["window"]) for row in rows] == [
            *(("eager", None), ("lazy", 0.1), ("lazy", 0.3), ("hollow", 0.1), ("hollow", 0.3)),
            *(("once", None), *((mode, None) for mode in SCHEDULER)),
        ]
        eager, once = rows[0], rows[5]
        for row in rows:
            assert row["found_rate"] == pytest.approx(row["gpu_rate"] + row["pool_rate"], abs=2e-6)
            assert (row["stored_blocks"] is None) == (row["mode"] == "once")
            if row["gap_closed"] is not None:
                gap = once["found_rate"] - eager["found_rate"]
                closed = (row["found_rate"] - eager["found_rate"]) / gap
                assert row["gap_closed"] == pytest.approx(closed, abs=1e-3, rel=2e-6 / gap)
        assert eager["stored_times"] == 1


def test_mixtures_without_other_speeds(tmp_path: Path, run: Run) -> None:
    paths = [
        write(tmp_path / f"{name}.jsonl", list(conversations(seed, turns=20)))
        for seed, name in enumerate("ab")
    ]
    sizes = ["--gpu", "0.1", "--gpu-pools", "1", "--gpu-window", "0.1"]
    found = run(trace_replay, "--trace", *map(str, paths), "--mix", *sizes).rows
    assert list(dict.fromkeys(row["trace"] for row in found)) == ["a", "b", "a+b", "a>b", "b>a"]


def test_other_starts_of_the_same_sessions() -> None:
    """Each session's requests stay in order and as far apart; another draw has other starts."""
    sessions = {1: [0.0, 5.0], 2: [3.0, 4.0, 9.0], 3: [8.0]}
    requests = [
        TraceRequest(second, 1024, 1, (session, 10 * session + number))
        for session, seconds in sessions.items()
        for number, second in enumerate(seconds)
    ]
    requests.append(TraceRequest(1.0, 20, 1, ()))  # fills no block, and so is of no session
    trace = Workload("a", sorted(requests, key=lambda each: each.timestamp_seconds))
    drawn = list(redrawn(trace, 3))
    assert [each.name for each in drawn] == ["a, draw 1", "a, draw 2", "a, draw 3"]
    starts = set()
    for each in drawn:
        times = [one.timestamp_seconds for one in each.requests]
        assert times == sorted(times) and len(times) == 6
        for session, seconds in sessions.items():
            own = [one for one in each.requests if one.hash_ids[0] == session]
            assert [one.hash_ids[1] for one in own] == [
                10 * session + number for number in range(len(seconds))
            ]
            gaps = [one.timestamp_seconds - own[0].timestamp_seconds for one in own]
            assert gaps == pytest.approx([second - seconds[0] for second in seconds])
            assert 0 <= own[0].timestamp_seconds <= 8
        starts.add(times[0])
    assert len(starts) == 3
    assert [one.timestamp_seconds for one in next(redrawn(trace, 1)).requests] == [
        one.timestamp_seconds for one in drawn[0].requests
    ]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpu", "2"], "--gpu: '2': must be fractions above 0, at most 1"),
        (["--gpu-pools", "0"], "--gpu-pools: '0': must be a number above 0"),
        (["--gpu-window", "0"], "--gpu-window: '0': must be fractions above 0, at most 1"),
        (["--draws", "-1"], "--draws: '-1': must be a whole number, at least 0"),
    ],
)
def test_what_is_refused(arguments: list[str], message: str, refusal: Refusal) -> None:
    assert message in refusal(trace_replay, *arguments)
