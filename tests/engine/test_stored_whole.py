"""Requests that end at once are stored whole: one token, or an embedding; copies that take steps."""

import pytest

from tests.engine.answers import BLOCK_SIZE, Prompt, prompt_of
from tests.engine.conftest import CPU_GIB, running
from tests.engine.engine import Engine
from tests.engine.process import EngineProcess

pytestmark = pytest.mark.engine

BLOCKS = 22
PAIR = [prompt_of(BLOCKS * BLOCK_SIZE + 7, seed=seed) for seed in (300, 301)]
"""The GPU cache of 48 blocks holds both, and no more."""


def embed(engine: Engine, prompts: list[Prompt]) -> None:
    """Ask for embeddings of all prompts at once."""
    from vllm import PoolingParams

    for prompt in prompts:
        engine.llm.add_request(
            f"embed-{id(prompt)}", {"prompt_token_ids": prompt}, PoolingParams(task="embed")
        )
    while engine.llm.has_unfinished_requests():
        engine.step()


def rest(engine: Engine) -> tuple[float, float]:
    """Let stores end; returns blocks in the pool, and blocks that were not stored."""
    side = engine.scheduler.connector._scheduler
    while side.has_pending_work:
        engine.llm.engine_core.get_output()
    unstored = [value for name, value in engine.counters().items() if name.startswith("unstored_")]
    return side.allocator.num_resident, sum(unstored)


def test_prompts_with_answers_of_one_token(inner_engine: EngineProcess) -> None:
    inner_engine.run(Engine.probe, "hold_ends_for", 3)
    inner_engine.run(Engine.ask, PAIR, 1)
    inner_engine.run(Engine.settle)
    assert inner_engine.run(Engine.forget_gpu)
    again = inner_engine.run(Engine.ask, PAIR, 1)
    assert [answer.num_cached for answer in again] == [BLOCKS * BLOCK_SIZE] * 2


def test_prompts_of_embeddings(tmp_path_factory: pytest.TempPathFactory) -> None:
    settings = {"runner": "pooling", "convert": "embed", "enable_prefix_caching": True}
    with running(tmp_path_factory, {"cpu_gib": CPU_GIB}, in_process=True, **settings) as engine:
        engine.run(Engine.probe, "hold_ends_for", 3)
        engine.run(embed, PAIR)
        assert engine.run(rest) == (2 * BLOCKS, 0)
