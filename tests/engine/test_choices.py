"""An engine that decides about each restore, and computes on a CPU of its own, as vLLM has it by default."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from offload.worker.pool.numa import cpus_near
from tests.engine.answers import BLOCK_SIZE, TOLERANCE, difference, prompt_of
from tests.engine.conftest import CPU_GIB, running
from tests.engine.engine import Engine
from tests.engine.process import EngineProcess

pytestmark = pytest.mark.engine

ALL = sorted(os.sched_getaffinity(0))
NEAR = [each for each in ALL if each in cpus_near({ALL[0]})]
PROMPTS = [prompt_of(20 * BLOCK_SIZE + 7, seed=70 + number) for number in range(6)]


@pytest.fixture(scope="module")
def bound_engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    bound = {"VLLM_CPU_OMP_THREADS_BIND": str(ALL[0])}
    settings = {"cpu_gib": CPU_GIB, "restore": "auto"}
    with running(tmp_path_factory, settings, variables=bound) as engine:
        yield engine


def test_whatever_is_chosen_is_counted_and_answers_are_the_same(bound_engine: EngineProcess) -> None:
    cold = [bound_engine.run(Engine.ask, [prompt])[0] for prompt in PROMPTS]
    assert bound_engine.run(Engine.forget_gpu)
    before = bound_engine.run(Engine.settle)
    again = [bound_engine.run(Engine.ask, [prompt])[0] for prompt in PROMPTS]
    counters = bound_engine.run(Engine.settle)
    assert max(map(difference, again, cold)) <= TOLERANCE
    assert counters["restore_choices"] - before.get("restore_choices", 0) == len(PROMPTS)
    num_restored = counters["restored_tokens"] - before.get("restored_tokens", 0)
    assert num_restored == sum(answer.num_cached for answer in again)


@pytest.mark.skipif(Path("/dev/nvidia0").exists(), reason="vLLM binds threads on its CPU backend only")
@pytest.mark.skipif(ALL[:1] == NEAR, reason="there is one CPU only, on its NUMA node")
def test_threads_that_copy_are_not_bound_to_the_cpu_that_computes(bound_engine: EngineProcess) -> None:
    bound_engine.run(Engine.ask, PROMPTS[:1])
    assert bound_engine.run(Engine.settle)["stored_bytes"] > 0
    computing, ours = bound_engine.run(Engine.probe, "cpus")
    assert computing == ALL[:1]
    assert {"kv-offload-store", "kv-offload-load", "kv-offload-seal_0"} <= ours.keys()
    assert list(ours.values()) == [NEAR] * len(ours), f"they may run on {ours}"
