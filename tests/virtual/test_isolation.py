"""KV of one is never served to another: every key that vLLM's prefix hashes hold, on its real scheduler."""

from typing import Any

import pytest
import torch
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.encoder_cache_manager import EncoderCacheManager

from offload.testing.virtual import VirtualEngine
from offload.testing.virtual.history import WrongBytesError
from tests.virtual.driver import Engines, depth_of, forget_gpu, serve, tokens, watch

BLOCK = 4
BLOCKS = 10
PROMPT = tokens(BLOCK * BLOCKS)


def lora(name: str = "adapter", path: str = "/adapters/1", number: int = 1, **options: Any) -> LoRARequest:
    return LoRARequest(name, number, path, **options)


def image(identifier: str, offset: int = 2 * BLOCK, length: int = 6) -> MultiModalFeatureSpec:
    return MultiModalFeatureSpec(None, "image", identifier, PlaceholderRange(offset, length))


def embeds(seed: int) -> torch.Tensor:
    return torch.randn(len(PROMPT), 3, generator=torch.Generator().manual_seed(seed))


KEYS = {
    "none, salt": ({}, {"salt": "tenant"}, 0),
    "two salts": ({"salt": "tenant"}, {"salt": "another"}, 0),
    "none, LoRA": ({}, {"lora": lora()}, 0),
    "LoRA of two names": ({"lora": lora()}, {"lora": lora("another", number=2)}, 0),
    "LoRA of two names and one number": ({"lora": lora()}, {"lora": lora("another")}, 0),
    "LoRA of two paths": ({"lora": lora()}, {"lora": lora(path="/adapters/2")}, 0),
    "none, image": ({}, {"features": [image("cat")]}, 2),
    "two images": ({"features": [image("cat")]}, {"features": [image("dog")]}, 2),
    "an image elsewhere": ({"features": [image("cat")]}, {"features": [image("cat", offset=9)]}, 2),
    "two second images": (
        {"features": [image("cat"), image("cat", 20)]},
        {"features": [image("cat"), image("dog", 20)]},
        5,
    ),
    "none, embeddings": ({}, {"embeds": embeds(1)}, 0),
    "two embeddings": ({"embeds": embeds(1)}, {"embeds": embeds(2)}, 0),
    "LoRA and salt": ({"lora": lora(), "salt": "tenant"}, {"lora": lora()}, 0),
}
"""By name: what the first request has, what the second, and how many leading blocks are the same."""


@pytest.fixture
def engine(engines: Engines) -> VirtualEngine:
    engine = engines(cpu_slots=200, gpu_blocks=40, verify_loads="always", chunk=64)
    engine.audit.explain_failures = True
    engine.scheduler.max_num_encoder_input_tokens = 100  # as for a model that takes images
    engine.scheduler.encoder_cache_manager = EncoderCacheManager(100)
    return engine


@pytest.mark.parametrize(("one", "other", "num_shared"), KEYS.values(), ids=KEYS.keys())
def test_kv_of_one_is_not_served_to_another(
    engine: VirtualEngine, one: dict[str, Any], other: dict[str, Any], num_shared: int
) -> None:
    """Tags depend on these keys, so that a wrong block is found by its bytes as well."""
    computed = watch(engine)
    for mine, yours in ((one, other), (other, one)):
        engine.reset()
        serve(engine, PROMPT, **mine)
        forget_gpu(engine)
        stranger = engine.add(PROMPT, 1, **yours)
        assert depth_of(engine, stranger) == num_shared
        assert engine.side.offer(stranger, 0).tokens == num_shared * BLOCK
        engine.drain()
        assert computed[stranger.request_id] == len(PROMPT) - num_shared * BLOCK
        assert depth_of(engine, stranger) == BLOCKS
        forget_gpu(engine)
        again = serve(engine, PROMPT, **mine)
        assert computed[again.request_id] == 1, "the same key is served, and from the pool"


def test_an_answer_is_not_served_to_another_either(engine: VirtualEngine) -> None:
    """Blocks of generated tokens carry the key of their request."""
    computed = watch(engine)
    first = serve(engine, PROMPT[:8], 20, lora=lora())
    turn = list(first.all_token_ids)[:24]
    forget_gpu(engine)
    stranger = serve(engine, turn, lora=lora("another", number=2))
    assert computed[stranger.request_id] == len(turn)
    forget_gpu(engine)
    mine = serve(engine, turn, lora=lora())
    assert computed[mine.request_id] == 1


@pytest.mark.parametrize(
    ("key", "left_out", "options"),
    [
        ("_gen_lora_extra_hash_keys", [], {"lora": lora()}),
        ("_gen_mm_extra_hash_keys", ([], 0), {"features": [image("cat")]}),
        ("_gen_prompt_embeds_extra_hash_keys", [], {"embeds": embeds(1)}),
    ],
)
def test_a_key_that_is_left_out_of_the_hashes_is_noticed(
    engine: VirtualEngine, monkeypatch: pytest.MonkeyPatch, key: str, left_out: Any, options: dict[str, Any]
) -> None:
    """These tests are not blind."""
    monkeypatch.setattr(kv_cache_utils, key, lambda *_: left_out)
    prompt = [0] * len(PROMPT)  # what stands for embeddings
    serve(engine, prompt, **options)
    forget_gpu(engine)
    with pytest.raises(WrongBytesError):
        serve(engine, prompt)
