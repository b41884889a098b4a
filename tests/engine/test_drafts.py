"""With speculative decoding, a restored prompt is drafted for and answered as one that the GPU still had."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest

from offload.testing.engines.models import tiny_eagle
from tests.engine.answers import BLOCK_SIZE, TOLERANCE, Answer, difference, prompt_of
from tests.engine.conftest import CPU_GIB, running
from tests.engine.engine import Engine, model_directory
from tests.engine.inspection import check_idle, gpu_blocks
from tests.engine.process import EngineProcess

pytestmark = pytest.mark.engine

PROMPT = prompt_of(20 * BLOCK_SIZE + 7, seed=1)
NUM_DRAFTS = 3
NUM_LAYERS = {"ngram": 4, "draft_model": 8, "eagle": 5}
"""That have KV: the model has four of them."""


class Drafting(NamedTuple):
    """An answer and how it came about.

    Attributes:
        answer: the engine's.
        drafts: what was drafted, step by step.
        num_drafted: drafts that the model was asked about.
        num_accepted: of these, those that were right.
        blocks: KV of the prompt's full blocks in the GPU's prefix cache, all layers.
    """

    answer: Answer
    drafts: list[list[int]]
    num_drafted: float
    num_accepted: float
    blocks: list[bytes]


class Runs(NamedTuple):
    """The same prompt, its KV from ever another place."""

    cold: Drafting
    gpu: Drafting
    restored: Drafting
    shifted: Drafting


def speculative_config(drafter: str) -> dict[str, Any]:
    config: dict[str, Any] = {"method": drafter, "num_speculative_tokens": NUM_DRAFTS}
    if drafter == "ngram":
        return config | {"prompt_lookup_min": 1, "prompt_lookup_max": 3}
    model = model_directory()
    return config | {"model": str(tiny_eagle(model) if drafter == "eagle" else model)}


def draft(engine: Engine, hints: dict[str, Any] | None = None) -> Drafting:
    """Ask, and note what is drafted meanwhile."""
    drafts: list[list[int]] = []
    take = engine.scheduler.update_draft_token_ids

    def noted(drafted: Any) -> None:
        drafts.extend(map(list, drafted.draft_token_ids))
        take(drafted)

    before = engine.settle()
    engine.scheduler.update_draft_token_ids = noted
    [answer] = engine.ask([PROMPT], 16, hints=hints)
    engine.scheduler.update_draft_token_ids = take
    after = engine.settle()
    num_drafted, num_accepted = (
        after.get(name, 0) - before.get(name, 0)
        for name in ("spec_decode_num_draft_tokens", "spec_decode_num_accepted_tokens")
    )
    return Drafting(answer, drafts, num_drafted, num_accepted, gpu_blocks(engine, PROMPT))


def run_all(engine: Engine) -> Runs:
    cold = draft(engine)
    gpu = draft(engine, {"cpu_offload_load": False})
    assert engine.forget_gpu()
    restored = draft(engine)
    assert engine.forget_gpu()
    engine.probe("set_verify", "never")
    engine.probe("shift_next_load", 4)
    shifted = draft(engine)
    check_idle(engine)
    return Runs(cold, gpu, restored, shifted)


@pytest.fixture(scope="module", params=["ngram", "draft_model", "eagle"])
def engine(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineProcess]:
    config = {"cpu_gib": 2 * CPU_GIB}
    drafts = speculative_config(request.param)
    with running(tmp_path_factory, config, in_process=True, speculative_config=drafts) as engine:
        yield engine


@pytest.fixture(scope="module")
def drafter(engine: EngineProcess, request: pytest.FixtureRequest) -> str:
    name: str = engine.run(method_of)
    return name


def method_of(engine: Engine) -> str:
    return str(engine.scheduler.vllm_config.speculative_config.method)


@pytest.fixture(scope="module")
def runs(engine: EngineProcess) -> Runs:
    return engine.run(run_all)


def test_restored_equals_gpu_hit_bit_for_bit(runs: Runs, drafter: str) -> None:
    """Its tokens, log-probabilities, drafts, how many of them were right, and its KV."""
    gpu, restored = runs.gpu, runs.restored
    num_blocks = 19 if drafter == "eagle" else 20  # one is computed again, as its last position may differ
    assert restored.answer.num_cached == gpu.answer.num_cached == num_blocks * BLOCK_SIZE
    assert restored.answer.tokens == gpu.answer.tokens and difference(restored.answer, gpu.answer) == 0
    assert restored.drafts == gpu.drafts and any(gpu.drafts)
    assert (restored.num_drafted, restored.num_accepted) == (gpu.num_drafted, gpu.num_accepted)
    assert restored.blocks[:num_blocks] == gpu.blocks[:num_blocks] and len(gpu.blocks) == 20
    assert {len(block) for block in gpu.blocks} == {NUM_LAYERS[drafter] * 32 * 1024}


def test_what_is_drafted_is_accepted_where_the_draft_model_is_the_model(runs: Runs, drafter: str) -> None:
    if drafter != "draft_model":
        assert runs.restored.num_drafted > 0
        return
    for run in (runs.cold, runs.gpu, runs.restored):
        assert run.num_accepted >= 0.9 * run.num_drafted > 0


def test_restored_equals_cold_run(runs: Runs) -> None:
    assert runs.restored.answer.tokens == runs.cold.answer.tokens
    assert difference(runs.restored.answer, runs.cold.answer) <= TOLERANCE


def test_draft_kv_that_is_shifted_is_drafted_from(runs: Runs, drafter: str) -> None:
    """By the bytes of a position. Drafts are others, the answer is the same: the model has the last word."""
    gpu, shifted = runs.gpu, runs.shifted
    assert shifted.answer.tokens == gpu.answer.tokens
    assert difference(shifted.answer, gpu.answer) <= TOLERANCE
    if drafter == "ngram":
        assert shifted.blocks == gpu.blocks
        return
    assert shifted.blocks[:19] != gpu.blocks[:19] and shifted.drafts != gpu.drafts
    if drafter == "draft_model":
        assert shifted.num_accepted < gpu.num_accepted or shifted.num_drafted > gpu.num_drafted
