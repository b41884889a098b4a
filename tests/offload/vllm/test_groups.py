"""vLLM's cache groups as the scheduler's side and the workers take them."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.errors import ConfigError
from offload.scheduler.groups import Kind
from offload.testing.virtual import MODELS
from offload.vllm.engine import _PositionHashes
from offload.vllm.groups import least_slots
from tests.virtual.driver import make_engine


@pytest.mark.parametrize("model", MODELS)
def test_workers_and_scheduler_agree_on_the_smallest_store(model: str) -> None:
    engine = make_engine(groups=MODELS[model], gpu_blocks=60)
    groups = engine.side._engine.groups
    assert least_slots(engine.scheduler.kv_cache_config) == groups.least
    assert groups.position_tokens == engine.settings.block_tokens
    assert groups.has_bags == any(each.kind is not Kind.FULL for each in groups._groups)
    engine.close()


@pytest.mark.parametrize("model", ["window", "mamba", "mixed"])
def test_a_pool_too_small_for_the_smallest_store_is_refused(model: str) -> None:
    engine = make_engine(groups=MODELS[model], gpu_blocks=60)
    least = engine.side._engine.groups.least
    engine.close()
    make_engine(groups=MODELS[model], gpu_blocks=60, cpu_slots=least).close()
    with pytest.raises(ConfigError, match=r"one place [0-9]* blocks; raise cpu_gib"):
        make_engine(groups=MODELS[model], gpu_blocks=60, cpu_slots=least - 1)


@given(raw=st.lists(st.binary(min_size=2, max_size=2), max_size=30), stride=st.integers(1, 4), data=st.data())
def test_hashes_of_positions_are_those_of_their_last_blocks(
    raw: list[bytes], stride: int, data: st.DataObject
) -> None:
    hashes: Sequence[bytes] = _PositionHashes(raw, stride)
    plain = [raw[(index + 1) * stride - 1] for index in range(len(raw) // stride)]
    assert len(hashes) == len(plain)
    assert list(hashes) == plain
    start, stop = data.draw(st.tuples(st.integers(0, 12), st.integers(0, 12)))
    step = data.draw(st.integers(1, 3))
    assert hashes[start:stop] == plain[start:stop]
    assert hashes[start:stop:step] == plain[start:stop:step]
    if plain:
        at = data.draw(st.integers(-len(plain), len(plain) - 1))
        assert hashes[at] == plain[at]
    raw.extend([b"xx"] * stride)
    assert len(hashes) == len(plain) + 1
