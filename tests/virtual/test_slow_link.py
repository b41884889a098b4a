"""On a link that does not keep up, stores keep nobody waiting, and the GPU's cache is not full of them."""

from typing import Any

import pytest
from vllm.v1.request import Request

from offload.messages import STORE
from offload.testing.virtual import MODELS, VirtualEngine
from tests.virtual.driver import Counts, Engines, come_to_rest, depth_of, hold, release, step_until, tokens

BLOCK = 4
SECONDS_PER_BLOCK = 0.1
IN_FLIGHT, QUEUED = 20, 5
"""Blocks that such a link copies in two seconds, and in half a second."""


@pytest.fixture
def make(engines: Engines) -> Engines:
    """Copies hang until ``release``. What they take is known."""

    def made(gpu_blocks: int, seconds_per_block: float = SECONDS_PER_BLOCK, **settings: Any) -> VirtualEngine:
        defaults = {"cpu_slots": 400, "chunk": 64 * BLOCK, "step_seconds": 0.01}
        engine = engines(gpu_blocks=gpu_blocks, **defaults | settings)
        link, slot_bytes = engine.side.costs.link(STORE), engine.side._common.slot_bytes
        for num_blocks in (1, 4) * 20:
            link.add(num_blocks * slot_bytes, num_blocks * seconds_per_block)
        hold(engine, STORE)
        return engine

    return made


def ended(engine: VirtualEngine) -> Request:
    """A prompt of 60 blocks, computed in one step."""
    request = engine.add(tokens(60 * BLOCK, first=7), 1)
    step_until(engine, request.is_finished)
    return request


@pytest.mark.parametrize("shape", [{}, {"num_ranks": 2}, {"num_ranks": 2, "replicas": 2}])
def test_so_much_is_in_flight_as_the_link_copies_soon(make: Engines, shape: dict[str, int]) -> None:
    engine = make(200, **shape)
    ended(engine)
    assert engine.side.stores.holds.num_held == IN_FLIGHT
    assert engine.side.stores.backlog.num_queued == 60 - IN_FLIGHT
    come_to_rest(engine)


def test_a_link_that_keeps_up_may_have_half_of_the_gpu_in_flight(make: Engines) -> None:
    engine = make(200, seconds_per_block=0.001)
    ended(engine)
    assert engine.side.stores.holds.num_held == 60
    come_to_rest(engine)


def test_while_nobody_computes_all_of_it_waits_and_is_stored(make: Engines) -> None:
    engine = make(200)
    request = ended(engine)
    for _ in range(20):
        engine.step()
    assert engine.side.stores.backlog.num_queued == 60 - IN_FLIGHT
    release(engine)
    come_to_rest(engine)
    assert depth_of(engine, request) == 60


def test_while_others_write_answers_all_of_it_waits(make: Engines) -> None:
    engine = make(200)
    other = engine.add(tokens(3, first=9), 40)
    step_until(engine, lambda: other.num_output_tokens > 0)
    ended(engine)
    for _ in range(20):
        engine.step()
    assert not other.is_finished() and engine.side.stores.backlog.num_queued == 60 - IN_FLIGHT
    come_to_rest(engine)


def test_while_others_compute_so_much_waits_as_the_link_copies_soon(make: Engines) -> None:
    engine = make(200)
    request = ended(engine)
    other = engine.add(tokens(8 * BLOCK, first=9), 1)
    step_until(engine, lambda: other.num_output_tokens > 0)
    assert engine.side.stores.backlog.num_queued <= QUEUED + 8  # and what the other one has left
    release(engine)
    come_to_rest(engine)
    assert IN_FLIGHT <= depth_of(engine, request) <= IN_FLIGHT + QUEUED


def test_what_waits_too_long_for_the_link_is_counted(make: Engines) -> None:
    engine = make(200)
    ended(engine)
    counts = Counts(engine)
    other = engine.add(tokens(8 * BLOCK, first=9), 1)
    step_until(engine, lambda: other.num_output_tokens > 0)
    assert counts["unstored_blocks_gave_way"] >= 60 - IN_FLIGHT - QUEUED
    come_to_rest(engine)


@pytest.mark.parametrize(("seconds_per_block", "waits"), [(0.1, False), (0.05, False), (0.001, True)])
def test_who_needs_blocks_waits_for_a_link_only_if_it_copies_them_soon(
    make: Engines, seconds_per_block: float, waits: bool
) -> None:
    """Patience lasts for half a second, which is 50 steps."""
    engine = make(65, seconds_per_block)
    ended(engine)
    assert engine.side.stores.backlog.num_queued
    other = engine.add(tokens(20 * BLOCK - 1, first=9), 1)
    before = engine.num_steps
    step_until(engine, lambda: other.num_output_tokens > 0)
    assert (engine.num_steps - before >= 50) is waits
    assert waits or engine.num_steps - before <= 3
    come_to_rest(engine)


def test_several_who_need_blocks_do_not_wait_for_it_either(make: Engines) -> None:
    engine = make(65)
    ended(engine)
    others = [engine.add(tokens(7 * BLOCK - 1, first=9 + number), 1) for number in range(3)]
    before = engine.num_steps
    step_until(engine, lambda: all(other.num_output_tokens > 0 for other in others))
    assert engine.num_steps - before <= 5
    come_to_rest(engine)


def test_the_end_of_a_prompt_is_stored_whole_where_a_part_is_worth_nothing(make: Engines) -> None:
    """With windows a prefix counts only with its checkpoint."""
    engine = make(300, groups=MODELS["window"], cpu_slots=800)
    request = ended(engine)
    release(engine)
    come_to_rest(engine)
    chain = engine.side._engine.chain(request)
    assert engine.side.allocator.usable_depth(chain, len(chain)) >= 59


def test_who_may_hold_less_than_a_position_waits(make: Engines) -> None:
    """Nothing is counted as not admitted for that."""
    engine = make(200, seconds_per_block=2.0 / 7, groups=MODELS["columns"])
    counts = Counts(engine)
    ended(engine)
    columns = engine.side._engine.groups.columns
    assert 0 < engine.side.stores.holds.num_holdable() < columns
    release(engine)
    come_to_rest(engine)
    assert counts["unstored_blocks_not_admitted"] == 0
