"""Our policy on vLLM's own connector, in the virtual engine: its real scheduler, manager and worker."""

from collections.abc import Callable

import pytest

from offload.messages import LOAD
from offload.testing.copiers.seeded import CopySchedule
from offload.testing.virtual import VirtualEngine, VirtualSettings
from tests.virtual.driver import (
    serve,
    tokens,
    watch,
)

KEYS = {"eviction_policy": "HazardCachePolicy", "cache_policy_module_path": "offload.vllm.native_policy"}


def computed_by_pass(engine: VirtualEngine, passes: int) -> list[int]:
    """Prompt tokens computed in each pass over 12 documents of 10 blocks."""
    computed = []
    for _ in range(passes):
        watched = watch(engine)
        for number in range(12):
            serve(engine, tokens(40, first=number))
        computed.append(sum(watched.values()))
    return computed


@pytest.mark.parametrize("chunk", [100, 16])
def test_a_cycle_larger_than_the_pool(engines: Callable[..., VirtualEngine], chunk: int) -> None:
    """12 documents, a pool for 6 and a GPU for 1: bytes are right, and LRU finds nothing."""
    sizes = {"gpu_blocks": 14, "cpu_slots": 60, "chunk": chunk, "store_decode_blocks": False}
    lru = engines(connector="native", **sizes)
    assert computed_by_pass(lru, 2) == [12 * 40] * 2 and not lru.copiers[0].copied[LOAD]
    engine = engines(connector="native", native_options=KEYS, **sizes)
    first, second, *others = computed_by_pass(engine, 6)
    assert first == 12 * 40 > second
    assert all(computed <= (12 - 4) * 40 for computed in others), others
    engine.audit.check_drained()


def test_preemptions_and_late_copies(engines: Callable[..., VirtualEngine]) -> None:
    engine = engines(
        connector="native",
        native_options=KEYS,
        gpu_blocks=14,
        cpu_slots=30,
        chunk=16,
        copies=CopySchedule(longest_delay=3, bytes_per_poll=3 * VirtualSettings().slot_bytes),
    )
    for turn in range(6):
        requests = [engine.add(tokens(20 + index, first=(index + turn) % 7), 12) for index in range(5)]
        engine.drain(1000)
        assert all(request.num_output_tokens == 12 for request in requests), f"turn {turn}"
    assert engine.counts["preemptions"] > 0 and engine.copiers[0].copied[LOAD] > 0
    engine.audit.check_drained()
