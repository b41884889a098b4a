"""Where checkpoints are, and up to which of them a request is restored."""

import pytest

from offload.testing.virtual import MODELS, VirtualEngine
from tests.virtual.driver import Engines, come_to_rest, forget_gpu, serve, tokens, warm, watch


def usable(engine: VirtualEngine, prompt: list[int]) -> int:
    """Tokens up to its deepest checkpoint, once it has been asked for."""
    chain = list(engine.side._engine.chain(serve(engine, prompt)))
    come_to_rest(engine)
    return engine.side.allocator.usable_depth(chain, len(chain)) * engine.settings.block_tokens


@pytest.fixture
def chunked(engines: Engines) -> VirtualEngine:
    """It has 45 tokens of a chain, and no checkpoint before their end. Chunks are of 16 tokens."""
    engine = engines(groups=MODELS["chunked"], gpu_blocks=150, cpu_slots=300, chunk=64)
    serve(engine, tokens(45))
    come_to_rest(engine)
    return engine


def test_a_checkpoint_that_needs_no_blocks_is_made_at_once(chunked: VirtualEngine) -> None:
    num_used = chunked.side.allocator.capacity - chunked.side.allocator.num_free
    assert usable(chunked, tokens(33)) == 32
    assert chunked.side.allocator.capacity - chunked.side.allocator.num_free == num_used


def test_a_checkpoint_that_needs_no_blocks_serves_others(chunked: VirtualEngine) -> None:
    serve(chunked, tokens(33))
    forget_gpu(chunked)
    computed = watch(chunked)
    request = serve(chunked, tokens(33) + tokens(20, first=7))
    assert computed[request.request_id] == 53 - 32
    come_to_rest(chunked)


def restored(engine: VirtualEngine, **hints: int) -> tuple[int, int]:
    """Tokens that a request computes where the GPU has the first 32, and the pool all; of how many."""
    warm(engine, tokens(81))
    forget_gpu(engine)
    serve(engine, tokens(33))
    computed = watch(engine)
    request = serve(engine, tokens(81) + tokens(5, first=9), hints=hints)
    come_to_rest(engine)
    return computed[request.request_id], request.num_prompt_tokens


def test_of_windows_no_more_is_restored_than_a_client_allows(engines: Engines) -> None:
    """Counted from what the GPU has."""
    engine = engines(groups=MODELS["window"], gpu_blocks=150, cpu_slots=300, chunk=16)
    assert restored(engine, max_load_tokens=16) == (86 - 48, 86)


def test_of_states_no_more_is_restored_than_a_client_allows(engines: Engines) -> None:
    engine = engines(groups=MODELS["mamba"], gpu_blocks=150, cpu_slots=300, chunk=16)
    assert restored(engine, max_load_tokens=16) == (86 - 48, 86)


def test_blocks_of_several_sizes_come_back_to_their_own_groups(engines: Engines) -> None:
    engine = engines(groups=MODELS["columns"], gpu_blocks=150, cpu_slots=300)
    warm(engine, tokens(45))
    forget_gpu(engine)
    computed = watch(engine)
    request = serve(engine, tokens(45))
    assert computed[request.request_id] == 45 - 40
    come_to_rest(engine)
