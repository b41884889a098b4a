"""The engine in memory: what the scheduler's side and a scheduler may count on."""

import subprocess
import sys

import pytest

from offload.scheduler.engine import Engine
from offload.testing.memory_engine import MemoryEngine, MemoryRequest

BLOCK = 2


def request_of(name: str, num_prompt: int, num_answer: int = 1) -> MemoryRequest:
    return MemoryRequest(name, range(num_prompt), [7] * num_answer, BLOCK)


def computed(engine: MemoryEngine, name: str, num_tokens: int) -> MemoryRequest:
    request = request_of(name, num_tokens)
    assert engine.give(request, num_tokens)
    engine.compute(request, num_tokens - engine.num_cached(request))
    return request


def test_it_is_an_engine() -> None:
    engine: Engine = MemoryEngine(4, BLOCK)
    assert (engine.num_blocks, engine.num_free, engine.num_spare) == (4, 4, 0)


def test_neither_vllm_nor_torch_is_needed() -> None:
    """Nor for anything of the scheduler's side, so its tests run on any machine in seconds."""
    program = (
        "import sys, offload.scheduler.side, offload.testing.memory_engine\n"
        "print([name for name in ('vllm', 'torch') if name in sys.modules])"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout == "[]\n"


def test_blocks_of_a_request_are_cached_when_they_are_full_and_found_by_the_next() -> None:
    engine = MemoryEngine(6, BLOCK)
    first = computed(engine, "first", 5)
    second = request_of("second", 7)
    assert engine.num_cached(second) == 2 * BLOCK
    assert engine.num_lacking(second, 7) == 2
    assert engine.give(second, 7)
    assert engine.table("second")[:2] == engine.table("first")[:2]
    engine.take_back(first.request_id)
    engine.check_invariants()
    assert engine.num_free == 2
    assert [engine.num_holds(block.block_id) for block in engine.table("second")] == [1] * 4


def test_one_token_is_always_computed() -> None:
    engine = MemoryEngine(6, BLOCK)
    computed(engine, "first", 4)
    assert engine.num_cached(request_of("second", 4)) == BLOCK


def test_too_few_blocks_change_nothing() -> None:
    engine = MemoryEngine(3, BLOCK)
    computed(engine, "first", 4)
    engine.take_back("first")
    assert not engine.give(request_of("second", 7), 7)
    assert (engine.num_free, engine.table("second")) == (3, [])
    engine.check_invariants()


def test_what_is_held_is_not_given_away() -> None:
    engine = MemoryEngine(3, BLOCK)
    computed(engine, "first", 4)
    held = engine.table("first")[:1]
    engine.hold(held)
    engine.take_back("first")
    assert engine.num_free == 2
    assert not engine.give(MemoryRequest("other", range(50, 56), [7], BLOCK), 6)
    engine.release(held)
    assert engine.give(MemoryRequest("other", range(50, 56), [7], BLOCK), 6)
    assert engine.num_free_of(iter(request_of("first", 4).block_hashes)) == 0, "its blocks were given away"
    engine.check_invariants()


def test_the_last_block_of_a_request_is_reused_first() -> None:
    engine = MemoryEngine(2, BLOCK)
    request = computed(engine, "first", 4)
    engine.take_back("first")
    assert engine.num_free_of(iter(request.block_hashes)) == 2
    assert engine.give(MemoryRequest("other", [50], [7], BLOCK), 1)
    assert engine.num_free_of(iter(request.block_hashes)) == 1
    assert engine.num_cached(request_of("again", 4)) == BLOCK


def test_the_cache_forgets_what_nobody_holds() -> None:
    engine = MemoryEngine(4, BLOCK)
    computed(engine, "first", 4)
    assert not engine.forget()
    assert engine.num_cached(request_of("second", 4)) == BLOCK
    engine.take_back("first")
    assert engine.forget()
    assert engine.num_cached(request_of("second", 4)) == 0


def test_what_nobody_holds_cannot_be_released() -> None:
    engine = MemoryEngine(2, BLOCK)
    computed(engine, "first", 2)
    block = engine.table("first")
    engine.take_back("first")
    with pytest.raises(AssertionError, match="nobody holds it"):
        engine.release(block)


@pytest.mark.parametrize("what", ["hold", "cache", "table"])
def test_check_invariants_sees_what_does_not_agree(what: str) -> None:
    engine = MemoryEngine(2, BLOCK)
    computed(engine, "first", 2)
    (block,) = engine.table("first")
    match what:
        case "hold":
            block.num_holds = 0
        case "cache":
            block.prefix_hash = b"other"
        case "table":
            engine._tables["second"] = [block]
    with pytest.raises(AssertionError):
        engine.check_invariants()
