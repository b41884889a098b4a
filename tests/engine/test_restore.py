"""A restored prompt is answered as one that the GPU's own prefix cache supplied, and as a cold one."""

from typing import NamedTuple

import pytest

from tests.engine.answers import (
    BLOCK_BYTES,
    BLOCK_SIZE,
    SEEN,
    TOLERANCE,
    Answer,
    Prompt,
    difference,
    prompt_of,
)
from tests.engine.engine import Engine
from tests.engine.process import EngineProcess

pytestmark = pytest.mark.engine

RAGGED = prompt_of(20 * BLOCK_SIZE + 7, seed=1)
WHOLE = prompt_of(20 * BLOCK_SIZE, seed=2)


class Runs(NamedTuple):
    """The same prompt, its KV from ever another place."""

    cold: Answer
    gpu: Answer
    corrupted: Answer
    restored: Answer
    again: Answer
    mixed: Answer


def ask(engine: EngineProcess, prompt: Prompt) -> Answer:
    [answer] = engine.run(Engine.ask, [prompt])
    return answer


def run_all(engine: EngineProcess, prompt: Prompt) -> Runs:
    assert engine.run(Engine.forget_all)
    cold = ask(engine, prompt)
    assert engine.run(Engine.forget_gpu)
    engine.run(Engine.probe, "corrupt_next_load", 7)
    corrupted = ask(engine, prompt)
    assert engine.run(Engine.forget_all)
    ask(engine, prompt)
    [gpu] = engine.run(Engine.ask, [prompt], hints={"cpu_offload_load": False})
    assert engine.run(Engine.forget_gpu)
    restored = ask(engine, prompt)
    assert engine.run(Engine.forget_gpu)
    again = ask(engine, prompt)
    assert engine.run(Engine.forget_gpu)
    ask(engine, prompt[: 10 * BLOCK_SIZE + 1])
    return Runs(cold, gpu, corrupted, restored, again, mixed=ask(engine, prompt))


@pytest.fixture(scope="module")
def ragged(session_engine: EngineProcess) -> Runs:
    return run_all(session_engine, RAGGED)


@pytest.fixture(scope="module")
def whole(session_engine: EngineProcess) -> Runs:
    return run_all(session_engine, WHOLE)


def test_prompts_matter(engine: EngineProcess, ragged: Runs) -> None:
    """Otherwise comparing answers would show nothing."""
    other = [*RAGGED[:40], RAGGED[40] ^ 1, *RAGGED[41:]]
    assert difference(ask(engine, other), ragged.cold) > SEEN


def test_restored_equals_gpu_hit_bit_for_bit(ragged: Runs) -> None:
    assert difference(ragged.corrupted, ragged.gpu) > SEEN
    for run in (ragged.restored, ragged.again, ragged.mixed):
        assert run.num_cached == ragged.gpu.num_cached, "not the same tokens were computed"
        assert difference(run, ragged.gpu) == 0
        assert run.tokens == ragged.gpu.tokens


def test_restored_equals_cold_run(ragged: Runs) -> None:
    assert difference(ragged.corrupted, ragged.cold) > SEEN
    assert difference(ragged.restored, ragged.cold) <= TOLERANCE
    assert ragged.restored.tokens == ragged.cold.tokens


def test_whole_blocks_restored_equal_gpu_hit_and_cold_run(whole: Runs) -> None:
    """Here a GPU hit computes the last block again and we a single token, so bits may differ from it."""
    for run in (whole.cold, whole.gpu):
        assert difference(whole.corrupted, run) > SEEN
        assert difference(whole.restored, run) <= TOLERANCE
        assert whole.restored.tokens == run.tokens
    assert difference(whole.restored, whole.again) == 0
    assert difference(whole.restored, whole.mixed) == 0


def test_cached_tokens_are_exactly_the_full_blocks(ragged: Runs, whole: Runs) -> None:
    """Also all of a prompt of whole blocks, of which the GPU's own cache leaves out the last one."""
    assert ragged.cold.num_cached == whole.cold.num_cached == 0
    assert {run.num_cached for run in ragged[1:]} == {20 * BLOCK_SIZE}
    assert whole.gpu.num_cached == len(WHOLE) - BLOCK_SIZE
    assert whole.restored.num_cached == whole.again.num_cached == whole.mixed.num_cached == len(WHOLE)


def test_tokens_are_counted_by_tier(engine: EngineProcess) -> None:
    """Cold, from the GPU, from the pool, and half from each; of 20 full blocks and 7 tokens."""
    half = RAGGED[: 10 * BLOCK_SIZE + 1]
    asked: list[tuple[Prompt, bool, int, int]] = [
        (RAGGED, False, 0, 0),
        (RAGGED, False, 20, 0),
        (RAGGED, True, 0, 20),
        (half, True, 0, 10),
        (RAGGED, False, 10, 10),
    ]
    for prompt, forget, from_gpu, from_cpu in asked:
        if forget:
            assert engine.run(Engine.forget_gpu)
        before = engine.run(Engine.settle)
        answer = ask(engine, prompt)
        after = engine.run(Engine.settle)
        counted = {name: after[name] - before[name] for name in before}
        assert answer.num_cached == (from_gpu + from_cpu) * BLOCK_SIZE
        assert counted["local_cache_hit"] == counted["prefix_cache_hits"] == from_gpu * BLOCK_SIZE
        assert counted["external_kv_transfer"] == from_cpu * BLOCK_SIZE
        assert counted["external_prefix_cache_hits"] == counted["restored_tokens"] == from_cpu * BLOCK_SIZE
        assert counted["restored_requests"] == (from_cpu > 0)
        assert counted["failed_jobs"] == 0
    assert after["loaded_bytes"] - before["loaded_bytes"] == 10 * BLOCK_BYTES


def test_requests_may_decline(engine: EngineProcess) -> None:
    """``kv_transfer_params`` keep a request out of the pool, and from being served by it."""
    engine.run(Engine.ask, [RAGGED], hints={"cpu_offload_store": False})
    assert engine.run(Engine.settle)["pool_used_blocks"] == 0
    ask(engine, WHOLE)
    assert engine.run(Engine.forget_gpu)
    [declined] = engine.run(Engine.ask, [WHOLE], hints={"cpu_offload_load": False, "cpu_offload_lod": 1})
    assert declined.num_cached == 0
    assert engine.run(Engine.settle)["pool_used_blocks"] == 20
