"""Restored KV lies where it belongs, byte for byte.

Positions are already in the keys, so attention does not see which block of a prompt comes first: two
swapped blocks change no answer, and only a look at the cache itself can show that there are none.
"""

import pytest

from tests.engine.answers import BLOCK_SIZE, SEEN, Answer, difference, prompt_of
from tests.engine.engine import Engine
from tests.engine.process import EngineProcess

pytestmark = pytest.mark.engine

PROMPT = prompt_of(12 * BLOCK_SIZE + 5, seed=3)


def kv_of(engine: Engine, num_tokens: int) -> tuple[list[bytes], Answer]:
    """Ask ``PROMPT``; at its first token, read the bytes of its full blocks in the order of its table."""
    name = engine.add(PROMPT[:num_tokens], 2)
    while not engine.step():
        pass
    [request_id] = engine.scheduler.requests
    [table] = engine.scheduler.kv_cache_manager.get_block_ids(request_id)
    kv = engine.probe("read_blocks", table[: num_tokens // BLOCK_SIZE])
    [answer] = engine.finish([name])
    return kv, answer


def test_blocks_come_back_in_order(inner_engine: EngineProcess) -> None:
    computed, cold = inner_engine.run(kv_of, len(PROMPT))
    assert len(set(computed)) == 12, "the prompt's blocks do not differ"
    assert inner_engine.run(Engine.forget_gpu)
    inner_engine.run(Engine.probe, "swap_in_next_load", 3, 8)
    swapped, answer = inner_engine.run(kv_of, len(PROMPT))
    assert [at for at in range(12) if swapped[at] != computed[at]] == [3, 8]
    assert difference(answer, cold) < SEEN, "answers show the order after all"
    assert inner_engine.run(Engine.forget_gpu)
    restored, answer = inner_engine.run(kv_of, len(PROMPT))
    assert answer.num_cached == 12 * BLOCK_SIZE
    assert restored == computed


def test_blocks_follow_those_the_gpu_still_has(inner_engine: EngineProcess) -> None:
    """The first five come from the GPU, the others from the pool."""
    computed, _ = inner_engine.run(kv_of, len(PROMPT))
    assert inner_engine.run(Engine.forget_gpu)
    inner_engine.run(kv_of, 5 * BLOCK_SIZE + 1)
    before = inner_engine.run(Engine.settle)
    restored, answer = inner_engine.run(kv_of, len(PROMPT))
    assert answer.num_cached == 12 * BLOCK_SIZE
    assert inner_engine.run(Engine.settle)["restored_tokens"] - before["restored_tokens"] == 7 * BLOCK_SIZE
    assert restored == computed
