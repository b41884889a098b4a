"""Many requests with long answers in a GPU cache far too small: preemption, chunked prefill, aborts."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from tests.engine.answers import BLOCK_SIZE, SEEN, Answer, Prompt, comparable, largest_difference, prompt_of
from tests.engine.conftest import CPU_GIB, running
from tests.engine.engine import Engine
from tests.engine.inspection import check_idle, compare_tiers
from tests.engine.process import EngineProcess

pytestmark = pytest.mark.engine

TOLERANCE = 1e-3
"""Requests are batched in ever other ways here, and parts of them computed again."""

MAX_TOKENS = 90

TIGHT: dict[str, Any] = {
    "in_process": True,
    "num_gpu_blocks": 21,
    "max_model_len": 16 * BLOCK_SIZE,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 80,
}


class Work(NamedTuple):
    """Twelve requests, in four groups that share a prefix of three blocks each."""

    prompts: list[Prompt]
    priorities: list[int]


@pytest.fixture(scope="module")
def work() -> Work:
    prefixes = [prompt_of(3 * BLOCK_SIZE, seed) for seed in range(200, 204)]
    prompts = [prefixes[n % 4] + prompt_of(10 + 17 * n, seed=210 + n) for n in range(12)]
    return Work(prompts, priorities=[(5 * n) % 12 for n in range(12)])


@pytest.fixture(scope="module")
def expected(work: Work, tmp_path_factory: pytest.TempPathFactory) -> list[Answer]:
    """What an engine without connector answers that has room for all."""
    with running(tmp_path_factory, None, in_process=True, num_gpu_blocks=200) as engine:
        answers = engine.run(Engine.ask, work.prompts, MAX_TOKENS)
        assert engine.run(Engine.counters)["num_preemptions"] == 0
        return answers


SCHEDULING: dict[str, dict[str, Any]] = {
    "fcfs": {"scheduling_policy": "fcfs", "async_scheduling": False},
    "priority": {"scheduling_policy": "priority", "async_scheduling": False},
    "asynchronous": {"scheduling_policy": "fcfs", "async_scheduling": True},
}


@pytest.fixture(scope="module", params=SCHEDULING)
def tight_engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineProcess]:
    """20 blocks on the GPU, prompts prefilled in chunks of at most 80 tokens."""
    settings = TIGHT | SCHEDULING[request.param]
    with running(tmp_path_factory, {"cpu_gib": CPU_GIB}, **settings) as engine:
        ahead = engine.run(runs_ahead)
        assert ahead == settings["async_scheduling"]
        yield engine


def runs_ahead(engine: Engine) -> bool:
    """Whether the engine schedules a step before the one before it has ended."""
    return engine.llm.engine_core.engine_core.batch_queue is not None


def assert_same(answers: list[Answer], expected: list[Answer]) -> None:
    """Log-probabilities agree, and tokens but for where two were as good as equal."""
    assert largest_difference(answers, expected) <= TOLERANCE
    lengths = [comparable(one, other) for one, other in zip(answers, expected, strict=True)]
    assert sum(lengths) >= 0.9 * sum(len(answer.tokens) for answer in expected), f"{lengths} comparable"


def test_answers_under_preemption(tight_engine: EngineProcess, work: Work, expected: list[Answer]) -> None:
    """Cold, then restored, then with one restored block wrong."""
    assert tight_engine.run(Engine.forget_all)
    before = tight_engine.run(Engine.settle)
    cold = tight_engine.run(Engine.ask, work.prompts, MAX_TOKENS, priorities=work.priorities)
    middle = tight_engine.run(Engine.settle)
    assert_same(cold, expected)
    assert middle["num_preemptions"] - before["num_preemptions"] > 0
    assert middle["restored_tokens"] > before["restored_tokens"], "preempted requests were computed again"
    tight_engine.run(check_idle)

    assert tight_engine.run(Engine.forget_gpu)
    restored = tight_engine.run(Engine.ask, work.prompts, MAX_TOKENS, priorities=work.priorities)
    after = tight_engine.run(Engine.settle)
    assert_same(restored, expected)
    assert after["num_preemptions"] - middle["num_preemptions"] > 0
    full = [len(prompt) // BLOCK_SIZE * BLOCK_SIZE for prompt in work.prompts]
    assert [answer.num_cached for answer in restored] == full
    assert after["failed_jobs"] == 0
    tight_engine.run(check_idle)
    num_blocks, largest = tight_engine.run(compare_tiers)
    assert num_blocks > 5
    assert largest <= TOLERANCE

    assert tight_engine.run(Engine.forget_gpu)
    tight_engine.run(Engine.probe, "corrupt_next_load", 1)
    corrupted = tight_engine.run(Engine.ask, work.prompts, MAX_TOKENS, priorities=work.priorities)
    assert largest_difference(corrupted, expected) > SEEN


def test_aborts_under_preemption(tight_engine: EngineProcess, work: Work, expected: list[Answer]) -> None:
    """Requests leave before their first step, while loading, in their prefill, and at their last tokens."""
    abort_at = {0: 1, 3: 3, 5: 30, 8: 90}
    assert tight_engine.run(Engine.forget_all)
    before = tight_engine.run(Engine.settle)
    for _ in range(2):
        answers = tight_engine.run(
            Engine.ask, work.prompts, MAX_TOKENS, priorities=work.priorities, abort_at=abort_at
        )
        kept = [index for index in range(12) if index not in abort_at]
        assert_same([answers[index] for index in kept], [expected[index] for index in kept])
        assert min(len(answers[index].tokens) for index in abort_at) < MAX_TOKENS
        after = tight_engine.run(Engine.settle)
        assert after["num_preemptions"] > before["num_preemptions"]
        assert after["failed_jobs"] == before["failed_jobs"]
        before = after
        tight_engine.run(check_idle)
        assert tight_engine.run(compare_tiers).largest_difference <= TOLERANCE
        assert tight_engine.run(Engine.forget_gpu), "GPU blocks are still held"
    restored = tight_engine.run(Engine.ask, work.prompts, MAX_TOKENS, priorities=work.priorities)
    assert_same(restored, expected)


def test_answers_under_preemption_by_default(
    engine: EngineProcess, work: Work, expected: list[Answer]
) -> None:
    """The same with the engine in processes of its own and no setting but a small cache."""
    prompts = [prompt_of(4 * BLOCK_SIZE, seed=230) + prompt for prompt in work.prompts]
    alone = [answer for prompt in prompts for answer in engine.run(Engine.ask, [prompt], MAX_TOKENS)]
    assert engine.run(Engine.forget_all)
    before = engine.run(Engine.settle)
    for _ in range(2):
        assert_same(engine.run(Engine.ask, prompts, MAX_TOKENS), alone)
        after = engine.run(Engine.settle)
        assert after["num_preemptions"] > before["num_preemptions"]
        assert engine.run(Engine.forget_gpu), "GPU blocks are still held"
        before = after
