"""An engine that decides about each restore."""

import pytest

from tests.engine.answers import BLOCK_SIZE, TOLERANCE, difference, prompt_of
from tests.engine.conftest import CPU_GIB, running
from tests.engine.engine import Engine

pytestmark = pytest.mark.engine

PROMPTS = [prompt_of(20 * BLOCK_SIZE + 7, seed=70 + number) for number in range(6)]


def test_whatever_is_chosen_is_counted_and_answers_are_the_same(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    with running(tmp_path_factory, {"cpu_gib": CPU_GIB, "restore": "auto"}) as engine:
        cold = [engine.run(Engine.ask, [prompt])[0] for prompt in PROMPTS]
        assert engine.run(Engine.forget_gpu)
        before = engine.run(Engine.settle)
        again = [engine.run(Engine.ask, [prompt])[0] for prompt in PROMPTS]
        counters = engine.run(Engine.settle)
    assert max(map(difference, again, cold)) <= TOLERANCE
    assert counters["restore_choices"] - before.get("restore_choices", 0) == len(PROMPTS)
    num_restored = counters["restored_tokens"] - before.get("restored_tokens", 0)
    assert num_restored == sum(answer.num_cached for answer in again)
