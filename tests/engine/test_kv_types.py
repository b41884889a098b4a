"""KV that is kept in another type than the model's is copied as it is."""

import pytest

from tests.engine.answers import BLOCK_BYTES, BLOCK_SIZE, SEEN, TOLERANCE, difference, prompt_of
from tests.engine.conftest import CPU_GIB, running
from tests.engine.engine import Engine

pytestmark = pytest.mark.engine

PROMPT = prompt_of(20 * BLOCK_SIZE + 7, seed=60)


def test_an_fp8_cache_is_restored(tmp_path_factory: pytest.TempPathFactory) -> None:
    """A block takes a quarter of what float32 takes. A block of other bytes shows."""
    with running(tmp_path_factory, {"cpu_gib": CPU_GIB}, kv_cache_dtype="fp8") as engine:
        [cold] = engine.run(Engine.ask, [PROMPT])
        assert engine.run(Engine.forget_gpu)
        engine.run(Engine.probe, "corrupt_next_load", 7)
        [corrupted] = engine.run(Engine.ask, [PROMPT])
        assert engine.run(Engine.forget_all)
        [gpu] = [engine.run(Engine.ask, [PROMPT])[0] for _ in range(2)][1:]
        assert engine.run(Engine.forget_gpu)
        [restored] = engine.run(Engine.ask, [PROMPT])
        counters = engine.run(Engine.settle)
    assert counters["pool_bytes"] / counters["pool_blocks"] == BLOCK_BYTES // 4
    assert gpu.num_cached == restored.num_cached == 20 * BLOCK_SIZE
    assert difference(restored, gpu) == 0, "restored bytes are not those that were computed"
    assert difference(restored, cold) <= TOLERANCE
    assert difference(corrupted, cold) >= SEEN, "the test is blind"
