"""Copies that fail, and requests that end or lose their cache while copies are under way."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.engine.answers import BLOCK_BYTES, BLOCK_SIZE, SEEN, TOLERANCE, Answer, difference, prompt_of
from tests.engine.engine import Engine
from tests.engine.inspection import check_idle, compare_tiers, stored_slots
from tests.engine.process import EngineProcess

pytestmark = pytest.mark.engine

PROMPT = prompt_of(12 * BLOCK_SIZE + 5, seed=20)
OTHER = prompt_of(40 * BLOCK_SIZE + 5, seed=21)
"""Takes nearly all of the GPU cache of 48 blocks."""


@pytest.mark.parametrize(
    ("fault", "num_good"),
    [("REFUSE", 0), ("FAIL", 0), ("STOP_HALFWAY", 6), ("END_SHORT", 6), ("WRONG_BYTES", 6)],
)
def test_failed_load_is_computed_instead(inner_engine: EngineProcess, fault: str, num_good: int) -> None:
    [cold] = inner_engine.run(Engine.ask, [PROMPT])
    assert inner_engine.run(Engine.forget_gpu)
    before = inner_engine.run(Engine.settle)
    inner_engine.run(Engine.probe, "fail_next", "LOAD", fault)
    [answer] = inner_engine.run(Engine.ask, [PROMPT])
    after = inner_engine.run(Engine.settle)
    assert difference(answer, cold) <= TOLERANCE
    assert after["failed_jobs"] - before["failed_jobs"] == 1
    assert after["restored_tokens"] - before["restored_tokens"] == num_good * BLOCK_SIZE
    stored_again = (after["stored_bytes"] - before["stored_bytes"]) / BLOCK_BYTES
    assert stored_again == 12 - num_good, "slots that could not be read were kept"
    assert after["pool_used_blocks"] == 12
    inner_engine.run(check_idle)
    assert inner_engine.run(Engine.forget_gpu)
    [restored] = inner_engine.run(Engine.ask, [PROMPT])
    assert restored.num_cached == 12 * BLOCK_SIZE
    assert difference(restored, cold) <= TOLERANCE


@pytest.mark.parametrize("fault", ["REFUSE", "FAIL", "STOP_HALFWAY", "END_SHORT"])
def test_failed_store_costs_a_miss(inner_engine: EngineProcess, fault: str) -> None:
    before = inner_engine.run(Engine.settle)
    inner_engine.run(Engine.probe, "fail_next", "STORE", fault)
    [cold] = inner_engine.run(Engine.ask, [PROMPT], 1)
    after = inner_engine.run(Engine.settle)
    assert after["failed_jobs"] - before["failed_jobs"] == 1
    assert after["pool_used_blocks"] == 0
    inner_engine.run(check_idle)
    [from_gpu] = inner_engine.run(Engine.ask, [PROMPT], 1)
    assert from_gpu.num_cached == 12 * BLOCK_SIZE
    assert inner_engine.run(Engine.forget_gpu)
    [restored] = inner_engine.run(Engine.ask, [PROMPT], 1)
    assert restored.num_cached == 12 * BLOCK_SIZE, "blocks that the GPU supplied were not stored"
    assert difference(restored, cold) <= TOLERANCE


def test_store_of_wrong_bytes_is_found_by_the_load(inner_engine: EngineProcess) -> None:
    inner_engine.run(Engine.probe, "fail_next", "STORE", "WRONG_BYTES")
    [cold] = inner_engine.run(Engine.ask, [PROMPT])
    assert inner_engine.run(Engine.forget_gpu)
    before = inner_engine.run(Engine.settle)
    [answer] = inner_engine.run(Engine.ask, [PROMPT])
    after = inner_engine.run(Engine.settle)
    assert difference(answer, cold) <= TOLERANCE
    assert after["failed_jobs"] - before["failed_jobs"] == 1
    assert after["restored_tokens"] - before["restored_tokens"] == 6 * BLOCK_SIZE


@pytest.mark.parametrize("verify", ["always", "never"])
def test_slot_that_decays(inner_engine: EngineProcess, verify: str) -> None:
    """It is found and never read again; without checksums it would be served, and seen in the answer."""
    inner_engine.run(Engine.probe, "set_verify", verify)
    [cold] = inner_engine.run(Engine.ask, [PROMPT])
    assert inner_engine.run(Engine.forget_gpu)
    slots = inner_engine.run(stored_slots)
    inner_engine.run(Engine.probe, "corrupt_slot", slots[8])
    before = inner_engine.run(Engine.settle)
    [answer] = inner_engine.run(Engine.ask, [PROMPT])
    after = inner_engine.run(Engine.settle)
    inner_engine.run(check_idle)
    if verify == "never":
        assert difference(answer, cold) > SEEN
        assert after["failed_jobs"] == before["failed_jobs"]
        return
    assert difference(answer, cold) <= TOLERANCE
    assert after["failed_jobs"] - before["failed_jobs"] == 1
    assert after["restored_tokens"] - before["restored_tokens"] == 8 * BLOCK_SIZE
    assert after["stored_bytes"] - before["stored_bytes"] == 4 * BLOCK_BYTES
    assert inner_engine.run(Engine.forget_gpu)
    [restored] = inner_engine.run(Engine.ask, [PROMPT])
    assert restored.num_cached == 12 * BLOCK_SIZE
    assert difference(restored, cold) <= TOLERANCE


@contextmanager
def copies_held(engine: Engine) -> Iterator[None]:
    """Inside, no copy ends as far as the engine can tell."""
    engine.probe("hold_ends", True)
    try:
        yield
    finally:
        engine.probe("hold_ends", False)


def abort_while_loading(engine: Engine) -> int:
    """The request goes while its blocks are being filled; return how many are in use then."""
    pool = engine.scheduler.kv_cache_manager.block_pool
    with copies_held(engine):
        name = engine.add(PROMPT, 4)
        engine.step()
        engine.llm.abort_request([name])
        engine.step()
        return pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()


def test_abort_while_loading(inner_engine: EngineProcess) -> None:
    [cold] = inner_engine.run(Engine.ask, [PROMPT])
    assert inner_engine.run(Engine.forget_gpu)
    assert inner_engine.run(abort_while_loading) == 12, "blocks being filled were given up"
    inner_engine.run(check_idle)
    [answer] = inner_engine.run(Engine.ask, [PROMPT])
    assert difference(answer, cold) <= TOLERANCE


def outlive(engine: Engine) -> int:
    """A request ends, its stores do not, and another needs the room; return how many blocks are held."""
    with copies_held(engine):
        engine.ask([PROMPT])
        held: int = engine.scheduler.connector._scheduler.stores.holds.num_held
        name = engine.add(OTHER, 1)
        for _ in range(20):
            assert not engine.step(), "the other request got blocks whose copies have not ended"
    engine.finish([name])
    return held


def test_blocks_being_stored_are_not_reused(inner_engine: EngineProcess) -> None:
    """48 blocks, 12 of them held by stores of a request that is gone: 41 must wait."""
    [cold] = inner_engine.run(Engine.ask, [PROMPT])
    assert inner_engine.run(Engine.forget_all)
    assert inner_engine.run(outlive) == 12
    inner_engine.run(check_idle)
    assert inner_engine.run(Engine.forget_gpu)
    [restored] = inner_engine.run(Engine.ask, [PROMPT])
    assert restored.num_cached == 12 * BLOCK_SIZE
    assert difference(restored, cold) <= TOLERANCE


def reset_while_loading(engine: Engine) -> Answer:
    """The pool is emptied, as after a change of weights, with a load under way: its bytes must not count."""
    with copies_held(engine):
        name = engine.add(PROMPT, 4)
        engine.step()
        assert not engine.llm.reset_prefix_cache(reset_connector=True), "blocks of the load are in use"
    [answer] = engine.finish([name])
    return answer


def test_reset_while_loading(inner_engine: EngineProcess) -> None:
    [cold] = inner_engine.run(Engine.ask, [PROMPT])
    assert inner_engine.run(Engine.forget_gpu)
    before = inner_engine.run(Engine.settle)
    answer = inner_engine.run(reset_while_loading)
    after = inner_engine.run(Engine.settle)
    assert difference(answer, cold) <= TOLERANCE
    assert after["restored_tokens"] == before["restored_tokens"], "bytes from before the reset were served"
    assert after["pool_used_blocks"] == 0, "KV from before the reset was stored"
    inner_engine.run(check_idle)


def test_tiers_are_compared(inner_engine: EngineProcess) -> None:
    """That the comparison which the tests under pressure rely on sees a wrong block, and only that."""
    inner_engine.run(Engine.ask, [PROMPT, OTHER[: 20 * BLOCK_SIZE]])
    assert inner_engine.run(compare_tiers) == (12 + 20, 0)
    assert inner_engine.run(Engine.forget_gpu)
    inner_engine.run(Engine.probe, "swap_in_next_load", 3, 8)
    inner_engine.run(Engine.ask, [PROMPT])
    num_blocks, largest = inner_engine.run(compare_tiers)
    assert num_blocks == 12
    assert largest > SEEN
