"""KV on disk survives the engine: the next one serves its first ask from there."""

import os
import shutil
import signal
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import vllm
from packaging.version import Version

from offload.testing.engines.hybrids import HYBRIDS, tiny_hybrid
from offload.testing.engines.process import EngineError
from tests.engine.answers import BLOCK_BYTES, BLOCK_SIZE, TOLERANCE, Answer, difference, prompt_of
from tests.engine.engine import Engine, model_directory
from tests.engine.process import EngineProcess
from tests.engine.test_hybrid import KINDS, MAMBA2, settings_of
from tests.engine.test_hybrid import QUESTIONS as HYBRID_QUESTIONS
from tests.seeds import FEWER_SEEDS

pytestmark = pytest.mark.engine

PROMPT = prompt_of(5 * 8 * BLOCK_SIZE + 20, seed=1)
OTHER = prompt_of(5 * 8 * BLOCK_SIZE + 20, seed=2)
QUESTION = HYBRID_QUESTIONS[0]
WHOLE = 2 * 16 * BLOCK_SIZE
"""Tokens of the whole extents of a prompt; one is 16 blocks of 128 KiB."""

_WAIT_SECONDS = 60.0
_SPILL_SECONDS = 1.0


def start(
    path: Path,
    number: int,
    *,
    cpu_gib: float = 0.0625,
    gib: float = 0.1,
    more: Mapping[str, Any] = MappingProxyType({}),
    **arguments: Any,
) -> EngineProcess:
    tier = {"kind": "disk", "path": str(path / "tier"), "gib": gib, **more}
    settings = {"cpu_gib": cpu_gib, "tiers": [tier]}
    return EngineProcess(path / f"engine{number}.log", settings, **{"fork": True} | arguments)


def ask(engine: EngineProcess, prompt: list[int] = PROMPT) -> Answer:
    [answer] = engine.run(Engine.ask, [prompt])
    return answer


def wait_until_kept(engine: EngineProcess, num_tokens: int) -> None:
    """Until the disk has the whole extents of so many tokens."""
    until = time.monotonic() + _WAIT_SECONDS
    while engine.run(Engine.settle).get("route_kept_bytes", 0) < num_tokens // BLOCK_SIZE * BLOCK_BYTES:
        assert time.monotonic() < until, engine.log()


def test_a_killed_engine_is_followed_by_one_that_serves_from_disk(tmp_path: Path) -> None:
    """What was written after a reset, with other weights, is of no use to an engine with the first ones."""
    with suppress(EngineError), start(tmp_path, 1) as engine:
        cold = ask(engine)
        wait_until_kept(engine, WHOLE)
        assert engine.run(Engine.forget_all)
        assert ask(engine).num_cached == 0, "a reset hides it from this engine"
        assert ask(engine, OTHER).num_cached == 0
        wait_until_kept(engine, 2 * WHOLE)
        for seed in range(10, 14):
            engine.run(Engine.add, prompt_of(1400, seed), 2)
        engine.run(Engine.step)
        os.killpg(engine.pid, signal.SIGKILL)  # while these are computed, stored and written
    with start(tmp_path, 2) as engine:
        first = ask(engine)
        assert first.num_cached == WHOLE
        assert difference(first, cold) < TOLERANCE
        assert engine.run(Engine.forget_gpu)
        restored = ask(engine)
        assert restored.num_cached == 5 * 8 * BLOCK_SIZE, "the pool has what was computed behind it"
        assert difference(first, restored) < TOLERANCE
        assert ask(engine, OTHER).num_cached == 0


def test_a_full_disk_is_given_the_best_of_the_pool_at_the_end(tmp_path: Path) -> None:
    """What was asked last is in the pool alone: nothing was about to evict it."""
    sizes: dict[str, Any] = {
        "gib": 0.03,
        "more": {"write_gib_per_day": 1000},
    }  # room for two prompts or three
    with start(tmp_path, 1, **sizes) as engine:
        for seed in range(10, 15):
            ask(engine, prompt_of(len(PROMPT), seed))
            engine.run(Engine.settle)
            time.sleep(_SPILL_SECONDS)
        cold = ask(engine)
        before = engine.run(Engine.settle)["route_bytes"]
        time.sleep(_SPILL_SECONDS)
        assert engine.run(Engine.settle)["route_bytes"] == before, "idle, and it is not written"
    with start(tmp_path, 2, **sizes) as engine:
        first = ask(engine)
    assert first.num_cached == WHOLE
    assert difference(first, cold) < TOLERANCE


def test_other_weights_find_nothing(tmp_path: Path) -> None:
    with start(tmp_path, 1) as engine:
        ask(engine)
        wait_until_kept(engine, WHOLE)
    model = tmp_path / "model"
    shutil.copytree(model_directory(), model)
    [weights] = model.glob("*.safetensors")
    content = bytearray(weights.read_bytes())
    content[-3] ^= 1
    weights.write_bytes(content)
    with start(tmp_path, 2, model=model) as engine:
        assert ask(engine).num_cached == 0


def test_another_attention_backend_finds_nothing(tmp_path: Path) -> None:
    """The setting is the same, automatic; what it comes to is not."""
    other = "tests.engine.other_backend.OtherBackend"
    with start(tmp_path, 1) as engine:
        ask(engine)
        wait_until_kept(engine, WHOLE)
    with start(tmp_path, 2, worker_extension_cls=other) as engine:
        assert ask(engine).num_cached == 0
        wait_until_kept(engine, WHOLE)
    with start(tmp_path, 3, worker_extension_cls=other) as engine:
        assert ask(engine).num_cached == WHOLE


def test_ranks_with_the_same_kv_write_it_once(tmp_path: Path) -> None:
    arguments = {"tensor_parallel_size": 2, "model": model_directory(kv_heads=1)}
    whole = len(PROMPT) // (32 * BLOCK_SIZE) * 32 * BLOCK_SIZE  # a block with one head is half as large
    with start(tmp_path, 1, **arguments) as engine:
        cold = ask(engine)
        wait_until_kept(engine, whole // 2)
        counters = engine.run(Engine.settle)
    assert counters["route_kept_bytes"] == whole // BLOCK_SIZE * BLOCK_BYTES // 2
    with start(tmp_path, 2, **arguments) as engine:
        first = ask(engine)
    assert first.num_cached == whole
    assert difference(first, cold) < TOLERANCE


@pytest.mark.parametrize("kind", ["qwen3_next"] if FEWER_SEEDS else KINDS)
def test_a_hybrid_model_goes_on_at_a_checkpoint_from_disk(kind: str, tmp_path: Path) -> None:
    if kind in MAMBA2 and Version(vllm.__version__).release < (0, 32):
        pytest.skip("vLLM's CPU backend has no float32 convolution for Mamba2 before 0.32")
    arguments = settings_of(HYBRIDS[kind]) | {"model": tiny_hybrid(kind)}
    with start(tmp_path, 1, cpu_gib=0.25, gib=0.5, **arguments) as engine:
        cold = ask(engine, QUESTION)
        assert engine.run(Engine.forget_gpu)
        restored = ask(engine, QUESTION)
        wait_until_kept(engine, 1)
        engine.run(Engine.settle)
        time.sleep(_SPILL_SECONDS)
        engine.run(Engine.settle)
    with start(tmp_path, 2, cpu_gib=0.25, gib=0.5, **arguments) as engine:
        first = ask(engine, QUESTION)
    assert cold.num_cached == 0 < restored.num_cached
    assert first.num_cached == restored.num_cached
    assert difference(first, restored) == 0
