"""Hashes of prompts that are asked about are those that vLLM's scheduler gives to requests."""

import random

import pytest
from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request

from offload.vllm.prompt_hashes import PromptHashes

BLOCK = 16
TOKENS = [random.Random(1).randrange(150_000) for _ in range(300)]
ALGORITHMS = ("sha256", "sha256_cbor", "xxhash", "xxhash_cbor")


@pytest.fixture(autouse=True)
def _seed_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM's seed is of the whole process: it is as before afterwards."""
    for name in ("NONE_HASH",):
        if hasattr(kv_cache_utils, name):
            monkeypatch.setattr(kv_cache_utils, name, getattr(kv_cache_utils, name))
        else:
            monkeypatch.setattr(kv_cache_utils, name, None, raising=False)  # and gone afterwards
            monkeypatch.delattr(kv_cache_utils, name)


def scheduled(algorithm: str, salt: str | None, adapter: tuple[str, str] | None) -> list[bytes]:
    """What a request has in vLLM's scheduler."""
    function = get_hash_fn_by_name(algorithm)
    init_none_hash(function)
    request = Request(
        "0",
        TOKENS,
        SamplingParams(max_tokens=1),
        None,
        lora_request=LoRARequest(adapter[0], 7, adapter[1]) if adapter else None,
        cache_salt=salt,
        block_hasher=get_request_block_hasher(BLOCK, function),
    )
    return list(request.block_hashes)


def made(
    algorithm: str, positions: int, salt: str, adapter: tuple[str, str] | None, step: int
) -> list[bytes]:
    """The same as an engine that is asked makes them, so many tokens at a time."""
    hash_prompt = PromptHashes(algorithm, BLOCK, positions * BLOCK)
    hashes: list[bytes] = []
    whole = len(TOKENS) // hash_prompt.position_tokens * hash_prompt.position_tokens
    for stop in [*range(step, whole, step), whole]:
        hash_prompt(TOKENS, stop, hashes, salt, adapter or ())
    return hashes


@pytest.mark.parametrize("adapter", [None, ("poems", "/adapters/poems")])
@pytest.mark.parametrize("salt", ["", "tenant 7"])
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_hashes_are_those_of_requests(
    algorithm: str, salt: str, adapter: tuple[str, str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "11")
    wanted = scheduled(algorithm, salt or None, adapter)
    assert len(wanted) == len(TOKENS) // BLOCK
    assert made(algorithm, 1, salt, adapter, 4 * BLOCK) == wanted
    assert made(algorithm, 1, salt, adapter, len(TOKENS)) == wanted
    assert made(algorithm, 3, salt, adapter, 3 * BLOCK) == wanted[2::3]


@pytest.mark.parametrize("algorithm", ["sha256", "sha256_cbor"])
def test_a_process_without_a_scheduler_takes_the_same_seed(
    algorithm: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    wanted = scheduled(algorithm, None, None)
    monkeypatch.delattr(kv_cache_utils, "NONE_HASH")
    assert made(algorithm, 1, "", None, BLOCK) == wanted


def test_what_differs_gives_other_hashes() -> None:
    alike = [
        made("sha256", 1, salt, adapter, BLOCK)
        for salt in ("", "a", "b")
        for adapter in (None, ("n", "/p"), ("n", "/q"), ("m", "/p"))
    ]
    assert len({tuple(each) for each in alike}) == 12
    assert len({each for hashes in alike for each in hashes}) == 12 * len(alike[0])
