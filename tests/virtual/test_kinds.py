"""Hybrid models on the virtual engine, without a connector: bytes are right, and wrong ones are seen."""

import random
import re
from collections.abc import Callable
from dataclasses import replace

import pytest
from vllm.v1.core.kv_cache_utils import get_group_id
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from offload.testing.virtual import MODELS, Group, VirtualEngine, VirtualSettings, draw_settings, run_seed
from offload.testing.virtual.cells import NULL_BLOCK
from offload.testing.virtual.drawing import HAS_EXACT_STATES, with_model
from offload.testing.virtual.history import WrongBytesError
from tests.virtual.driver import Engines, come_to_rest, forget_gpu, serve, step_until, tokens

HYBRIDS = [model for model in MODELS if model != "plain"]


def bare(engines: Engines, model: str, **settings: object) -> VirtualEngine:
    """An engine with that model and nothing below its GPU cache."""
    return engines(connector="none", groups=MODELS[model], gpu_blocks=120, **settings)


def group_of(engine: VirtualEngine, kind: str) -> int:
    """The first group of that kind."""
    return [group.kind for group in engine.settings.groups].index(kind)


def decoding(engine: VirtualEngine, num_prompt: int = 40, first: int = 0) -> Request:
    """A request that has its first tokens."""
    request = engine.add(tokens(num_prompt, first), 30)
    step_until(engine, lambda: request.num_output_tokens == 3)
    return request


def table_of(engine: VirtualEngine, request: Request, group: int) -> list[int]:
    """Its GPU blocks of that group, as workers have them."""
    table: list[int] = engine.runner._states[request.request_id].tables[group]
    return table


@pytest.mark.parametrize("model", HYBRIDS)
def test_random_runs(model: str) -> None:
    """Prefixes shared on the GPU, prompts in chunks, preemptions, aborts, resets."""
    found = preempted = 0
    for seed in range(12):
        rng = random.Random(f"{model} {seed}")
        settings = replace(draw_settings(rng, faults=False), connector="none")
        report = run_seed(seed, turns=120, settings=with_model(settings, model, rng))
        found += report.counts["tokens found"]
        preempted += report.counts["preemptions"]
    assert found > 1000 and preempted > 10


@pytest.mark.parametrize("model", HYBRIDS)
def test_the_gpus_own_cache_is_hit(engines: Engines, model: str) -> None:
    engine = bare(engines, model)
    prompt, found = tokens(61), 60 // engine.sizes.hits * engine.sizes.hits
    serve(engine, prompt)
    assert not engine.counts["tokens found"]
    serve(engine, prompt)
    assert engine.counts["tokens found"] == found, "all whole blocks before the last token"
    forget_gpu(engine)
    serve(engine, prompt)
    assert engine.counts["tokens found"] == found, "found again though the cache was reset"
    come_to_rest(engine)


def test_blocks_of_all_groups_lie_in_the_same_memory(engines: Engines) -> None:
    """Otherwise a block id that belongs to two groups at a time would go unnoticed."""
    engine = bare(engines, "mixed")
    (rank,) = engine.ranks
    starts = {cells.cells[:, 5].__array_interface__["data"][0] for cells in rank.groups}
    assert len(starts) == 1 and len(rank.groups) == 3
    assert [len(cells.cells) for cells in rank.groups] == [2, 2, 1]
    assert [cells.cells.shape[2] for cells in rank.groups] == [8, 4, 8]


class TestNobodyReadsWhatItDoesNotNeed:
    @pytest.mark.parametrize(("model", "kind"), [("window", "window"), ("chunked", "chunk")])
    def test_tokens_before_the_window_or_chunk_may_be_anything(
        self, engines: Engines, model: str, kind: str
    ) -> None:
        engine = bare(engines, model)
        request, group = decoding(engine), group_of(engine, kind)
        cells = engine.ranks[0].groups[group]
        first = cells.group.first_read(request.num_computed_tokens)
        manager = engine.scheduler.kv_cache_manager
        used = {block_id for table in manager.get_block_ids(request.request_id) for block_id in table}
        old = set(table_of(engine, request, group)[: first // 4]) - used
        assert old, "the test is blind: all that lies before is another group's by now"
        cells.cells[:, list(old)] = 1
        cells.cells[:, table_of(engine, request, group)[first // 4], : first % 4] = 1
        engine.step()

    def test_states_before_the_last_may_be_anything(self, engines: Engines) -> None:
        engine = bare(engines, "mamba")
        request, group = decoding(engine), group_of(engine, "state")
        *old, last = [block for block in table_of(engine, request, group) if block != NULL_BLOCK]
        assert old, "the test is blind: there is one state only"
        engine.ranks[0].groups[group].cells[:, old] = 1
        engine.step()
        engine.ranks[0].groups[group].cells[:, last] = 1
        with pytest.raises(WrongBytesError):
            engine.step()


def wrong(engine: VirtualEngine, group: int, position: int, what: str) -> None:
    """The next step fails, and says so of that group and token position."""
    kind = engine.settings.groups[group].kind
    pattern = (
        rf"positions \[{position}(, \d+)*\].* in group {group} \({kind}\).*: {re.escape(what)}; GPU block"
    )
    with pytest.raises(WrongBytesError, match=pattern) as failure:
        engine.step()
    assert "history of GPU block" in str(failure.value)


class TestWrongBytesAreSeen:
    @pytest.mark.parametrize(
        ("model", "kind"),
        [("window", "window"), ("windows", "window"), ("chunked", "chunk"), ("mixed", "window")],
    )
    @pytest.mark.parametrize("num_ranks", [1, 2])
    def test_one_bit_at_either_end_of_what_is_read(
        self, engines: Engines, model: str, kind: str, num_ranks: int
    ) -> None:
        for end in (0, -1):
            engine = bare(engines, model, num_ranks=num_ranks)
            request, group = decoding(engine), group_of(engine, kind)
            cells = engine.ranks[-1].groups[group]
            stop = request.num_computed_tokens
            position = range(cells.group.first_read(stop), stop)[end]
            block_id = table_of(engine, request, group)[position // cells.span]
            cells.cells[-1, block_id, position % cells.span, 0] ^= 1
            wrong(engine, group, position, "of another chain, or of other weights")

    @pytest.mark.parametrize("model", ["mamba", "states", "mamba2", "mamba_window"])
    @pytest.mark.parametrize(
        ("after", "what"), [(1, "applied twice"), (-1, "stale")], ids=lambda each: str(each)
    )
    def test_a_state_of_another_token(self, engines: Engines, model: str, after: int, what: str) -> None:
        engine = bare(engines, model)
        request, group = decoding(engine), group_of(engine, "state")
        cells, stop = engine.ranks[0].groups[group], request.num_computed_tokens
        tags = engine.runner._states[request.request_id].chain.tags
        other = stop - 1 + after
        block_id = table_of(engine, request, group)[(stop - 1) // cells.span]
        words = cells.expected(tags[other : other + 1], 0)
        assert cells.cells[0, block_id, 0, 0] == cells.expected(tags[stop - 1 : stop], 0)[0, 0]
        cells.cells[:, block_id, 0, 0] = words[:, 0]
        wrong(engine, group, stop - 1, f"what is right at [{other}]")

    @pytest.mark.parametrize("model", ["mamba", "states"])
    def test_a_state_of_another_chain(self, engines: Engines, model: str) -> None:
        engine = bare(engines, model)
        request, other = decoding(engine), decoding(engine, first=1)
        group = group_of(engine, "state")
        cells, stop = engine.ranks[0].groups[group], request.num_computed_tokens
        mine = table_of(engine, request, group)[(stop - 1) // cells.span]
        cells.cells[:, mine] = cells.cells[:, table_of(engine, other, group)[-1]]
        wrong(engine, group, stop - 1, "of another chain, or of other weights")

    @pytest.mark.parametrize("model", HYBRIDS)
    def test_what_is_another_groups(self, engines: Engines, model: str) -> None:
        """Tags of the same tokens, but of other layers."""
        engine = bare(engines, model)
        request = decoding(engine)
        cells = engine.ranks[0].groups[-1]
        block_id = table_of(engine, request, cells.index)[(request.num_computed_tokens - 1) // cells.span]
        cells.cells[..., 0][:, block_id] ^= cells.masks[:1] ^ engine.ranks[0].groups[0].masks[1:2]
        with pytest.raises(WrongBytesError, match=f"in group {cells.index} "):
            engine.step()

    @pytest.mark.parametrize("model", HYBRIDS)
    def test_a_block_that_nobody_wrote_since_it_was_taken(self, engines: Engines, model: str) -> None:
        for group in range(len(MODELS[model])):
            engine = bare(engines, model)
            request = decoding(engine)
            cells = engine.ranks[0].groups[group]
            last = request.num_computed_tokens - 1
            block_id = table_of(engine, request, group)[last // cells.span]
            engine.ranks[0].forget([block_id], engine.num_steps)
            with pytest.raises(WrongBytesError, match=f"group {group} .*: nobody wrote to the block"):
                engine.step()

    @pytest.mark.parametrize("model", HYBRIDS)
    def test_a_block_that_is_not_there(self, engines: Engines, model: str) -> None:
        for group in range(len(MODELS[model])):
            engine = bare(engines, model)
            request = decoding(engine, 38)
            assert request.num_computed_tokens == 40, "what is computed next goes to other blocks"
            cells = engine.ranks[0].groups[group]
            table_of(engine, request, group)[39 // cells.span] = NULL_BLOCK
            with pytest.raises(WrongBytesError, match=f"group {group} .*: there is no block"):
                engine.step()


@pytest.mark.parametrize("model", MODELS)
def test_what_the_gpu_remembers_is_looked_at(engines: Engines, model: str) -> None:
    """Nobody has asked for it again."""
    for group, kind in enumerate(each.kind for each in MODELS[model]):
        engine = bare(engines, model)
        serve(engine, tokens(61))
        engine.audit.check_gpu_cache()
        pool = engine.scheduler.kv_cache_manager.block_pool
        block = next(
            each for each in pool.blocks if each.block_hash and get_group_id(each.block_hash) == group
        )
        engine.ranks[0].groups[group].cells[-1, block.block_id, 0, 0] ^= 1
        with pytest.raises(WrongBytesError, match=rf"block {block.block_id} has the hash of .* \({kind}\)"):
            engine.audit.check_gpu_cache()


def outputs(engine: VirtualEngine) -> list[SchedulerOutput]:
    """All that is scheduled from now on."""
    seen: list[SchedulerOutput] = []
    schedule: Callable[[], SchedulerOutput] = engine.scheduler.schedule

    def watched() -> SchedulerOutput:
        seen.append(schedule())
        return seen[-1]

    engine.scheduler.schedule = watched
    return seen


@pytest.mark.skipif(not HAS_EXACT_STATES, reason="vLLM 0.31 keeps no state at the end of a prompt")
def test_hits_inside_a_block_are_copied_first(engines: Engines) -> None:
    """vLLM asks for copies of shared blocks that are half full, and of others' states."""
    engine = bare(engines, "mamba", match_unit=2)
    prompt = tokens(30)
    serve(engine, prompt, 4)
    seen = outputs(engine)
    serve(engine, [*prompt[:29], 500, 501], 4)
    assert engine.counts["tokens found"] == 28
    assert len(seen[0].kv_cache_block_copies) == 3, "one block of each group"
    come_to_rest(engine)


def test_new_blocks_are_zeroed_beside_states_only(engines: Engines) -> None:
    for model, is_zeroed in {"mamba": True, "window": False}.items():
        engine = bare(engines, model)
        seen = outputs(engine)
        request = decoding(engine, 20)
        assert any(output.new_block_ids_to_zero for output in seen) is is_zeroed
        group = group_of(engine, "full")
        behind = engine.ranks[0].groups[group].cells[:, table_of(engine, request, group)[-1], -1, 0]
        assert (not behind.any()) is is_zeroed


def test_a_state_inside_the_last_step_of_a_prompt_is_kept(engines: Engines) -> None:
    """Without such a checkpoint block the scheduler cuts the prompt there."""
    steps = {}
    for model in ("mamba", "mamba2"):
        engine = bare(engines, model, chunk=64)
        seen = outputs(engine)
        serve(engine, tokens(45))
        steps[model] = sum(1 for output in seen if output.total_num_scheduled_tokens)
        serve(engine, tokens(45))
        assert engine.counts["tokens found"] == 40
    assert steps == {"mamba": 2, "mamba2": 1}


class TestRefusals:
    @pytest.mark.parametrize(
        ("settings", "message"),
        [
            ({"groups": MODELS["mamba"], "drafter": "ngram", "num_drafts": 2}, "states of drafts"),
            ({"groups": MODELS["window"], "drafter": "eagle", "num_drafts": 2}, "no layers that draft"),
            ({"groups": MODELS["window"], "dcp": 2, "num_ranks": 2}, "shares no windows"),
            ({"groups": (Group(), Group(kind="state", block_size=8))}, "block_size=4"),
        ],
    )
    def test_engines_that_vllm_does_not_make(self, settings: dict[str, object], message: str) -> None:
        with pytest.raises(ValueError, match=message):
            VirtualSettings(**settings)  # type: ignore[arg-type]

    @pytest.mark.parametrize("group", [{"kind": "linear"}, {"kind": "window"}, {"kind": "full", "reach": 4}])
    def test_groups_that_are_none(self, group: dict[str, object]) -> None:
        with pytest.raises(ValueError, match=r"must be one of|do not go together"):
            Group(**group)  # type: ignore[arg-type]
