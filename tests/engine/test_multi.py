"""Our connector beside vLLM's own in a MultiConnector: both restore, and the answers are the same."""

from typing import Any

import pytest

from offload.testing.engines.environment import transfer_config
from tests.engine.answers import ALL_RESTORED, BLOCK_SIZE, SEEN, TOLERANCE, difference, prompt_of
from tests.engine.conftest import CPU_GIB, running
from tests.engine.engine import Engine

pytestmark = pytest.mark.engine

OURS = transfer_config({"cpu_gib": CPU_GIB, **ALL_RESTORED})
THEIRS = transfer_config(
    {
        "cpu_bytes_to_use": int(CPU_GIB * 2**30),
        "spec_name": "PlainCpuCopySpec",
        "spec_module_path": "benchmarks.common.native_cpu_spec",
    },
    "OffloadingConnector",
)


@pytest.mark.parametrize("children", [(OURS, THEIRS), (THEIRS, OURS)], ids=["ours first", "ours last"])
def test_it_serves_the_same_beside_vllms_own(
    tmp_path_factory: pytest.TempPathFactory, children: tuple[dict[str, Any], ...]
) -> None:
    """The first child that has something restores it; both store."""
    transfer = {
        **transfer_config({"connectors": list(children)}, "MultiConnector"),
        "kv_load_failure_policy": "recompute",
    }
    prompt = prompt_of(20 * BLOCK_SIZE + 7, seed=1)
    with running(tmp_path_factory, None, kv_transfer_config=transfer) as engine:
        [cold] = engine.run(Engine.ask, [prompt])
        stored = engine.run(Engine.settle)["stored_bytes"]
        assert engine.run(Engine.forget_gpu), "GPU blocks are still held"
        [restored] = engine.run(Engine.ask, [prompt])
        [other] = engine.run(Engine.ask, [prompt_of(20 * BLOCK_SIZE + 7, seed=2)])
        after = engine.run(Engine.settle)
    assert stored > 0
    assert after["external_kv_transfer"] == 20 * BLOCK_SIZE
    assert (after["restored_tokens"] > 0) is (children[0] is OURS)
    assert difference(cold, restored) <= TOLERANCE
    assert difference(cold, other) >= SEEN, "the test is blind"
