"""What comes back from the pool, and what does not: rounds, shared prefixes, second turns, resets."""

import pytest

from tests.engine.answers import (
    BLOCK_SIZE,
    SEEN,
    TOLERANCE,
    Answer,
    Prompt,
    difference,
    largest_difference,
    prompt_of,
)
from tests.engine.engine import Engine
from tests.engine.process import EngineProcess

pytestmark = pytest.mark.engine

LONG = [prompt_of(40 * BLOCK_SIZE + 11, seed=seed) for seed in range(100, 106)]
"""Of these the GPU cache of 48 blocks holds one."""


def in_turn(engine: Engine, prompts: list[Prompt]) -> list[Answer]:
    """Ask one after the other."""
    return [answer for prompt in prompts for answer in engine.ask([prompt])]


def test_prompts_cycled_through_a_gpu_cache_that_holds_one(engine: EngineProcess) -> None:
    engine.run(in_turn, LONG)
    engine.run(Engine.settle)
    engine.run(Engine.probe, "corrupt_next_load", 20)
    corrupted = engine.run(in_turn, LONG)
    assert engine.run(Engine.forget_all)
    first, second, third = (engine.run(in_turn, LONG) for _ in range(3))
    assert [difference(*pair) > SEEN for pair in zip(corrupted, first, strict=True)] == [True] + [False] * 5
    assert {answer.num_cached for answer in first} == {0}
    assert {answer.num_cached for answer in second + third} == {40 * BLOCK_SIZE}
    assert largest_difference(second, first) <= TOLERANCE
    assert largest_difference(third, second) == 0
    assert engine.run(Engine.settle)["pool_used_blocks"] == 6 * 40


def test_requests_share_a_prefix(engine: EngineProcess) -> None:
    """At the same time: all computing it, all restoring it, and all restoring it and more."""
    prefix = prompt_of(10 * BLOCK_SIZE, seed=7)
    prompts = [prefix + prompt_of(3 * BLOCK_SIZE + 5, seed) for seed in range(8, 12)]
    alone = engine.run(in_turn, prompts)
    assert engine.run(Engine.forget_all)
    together = engine.run(Engine.ask, prompts)
    assert largest_difference(together, alone) <= TOLERANCE
    assert engine.run(Engine.settle)["pool_used_blocks"] == 10 + 4 * 3

    assert engine.run(Engine.forget_all)
    engine.run(Engine.ask, [prefix])
    assert engine.run(Engine.forget_gpu)
    engine.run(Engine.probe, "corrupt_next_load", 5)
    assert largest_difference(engine.run(Engine.ask, prompts), alone) > SEEN

    assert engine.run(Engine.forget_all)
    engine.run(Engine.ask, [prefix])
    for num_blocks in (10, 13):
        assert engine.run(Engine.forget_gpu)
        restored = engine.run(Engine.ask, prompts)
        assert {answer.num_cached for answer in restored} == {num_blocks * BLOCK_SIZE}
        assert largest_difference(restored, alone) <= TOLERANCE
        assert engine.run(Engine.settle)["pool_used_blocks"] == 10 + 4 * 3


@pytest.mark.parametrize(
    ("max_tokens", "num_full"),
    [(70, 5), (29, 4), (28, 3)],
    ids=["ragged", "the last block just full", "its last token never computed"],
)
def test_second_turn_restores_generated_tokens(engine: EngineProcess, max_tokens: int, num_full: int) -> None:
    """The last token of an answer was drawn but not computed; the blocks before it are all there."""
    question = prompt_of(3 * BLOCK_SIZE + 4, seed=13)
    [answer] = engine.run(Engine.ask, [question], max_tokens)
    turn = [*question, *answer.tokens, *prompt_of(40, seed=14)]
    [from_gpu] = engine.run(Engine.ask, [turn])
    assert from_gpu.num_cached == num_full * BLOCK_SIZE

    def second_turn() -> Answer:
        """With the pool as the first turn leaves it."""
        assert engine.run(Engine.forget_all)
        engine.run(Engine.ask, [question], max_tokens)
        assert engine.run(Engine.forget_gpu)
        [answer] = engine.run(Engine.ask, [turn])
        return answer

    engine.run(Engine.settle)
    restored = second_turn()
    assert restored.num_cached == num_full * BLOCK_SIZE
    assert difference(restored, from_gpu) == 0
    assert engine.run(Engine.forget_all)
    [cold] = engine.run(Engine.ask, [turn])
    assert cold.num_cached == 0
    assert difference(restored, cold) <= TOLERANCE


def test_corrupted_generated_block_is_seen(engine: EngineProcess) -> None:
    """What makes the test above fail."""
    question = prompt_of(3 * BLOCK_SIZE + 4, seed=13)
    [answer] = engine.run(Engine.ask, [question], 70)
    turn = [*question, *answer.tokens, *prompt_of(40, seed=14)]
    assert engine.run(Engine.forget_gpu)
    engine.run(Engine.probe, "corrupt_next_load", 4)
    [corrupted] = engine.run(Engine.ask, [turn])
    assert engine.run(Engine.forget_all)
    [cold] = engine.run(Engine.ask, [turn])
    assert difference(corrupted, cold) > SEEN


def test_reset_with_the_connector_empties_the_pool(engine: EngineProcess) -> None:
    engine.run(Engine.ask, [LONG[0]])
    assert engine.run(Engine.settle)["pool_used_blocks"] == 40
    assert engine.run(Engine.forget_gpu)
    assert engine.run(Engine.settle)["pool_used_blocks"] == 40
    assert engine.run(Engine.forget_all)
    assert engine.run(Engine.settle)["pool_used_blocks"] == 0
    [answer] = engine.run(Engine.ask, [LONG[0]])
    assert answer.num_cached == 0
