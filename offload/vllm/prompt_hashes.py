"""Prefix hashes of prompts that are not requests of this engine, made by vLLM's own functions."""

from collections.abc import Sequence
from typing import Any

from vllm.config import VllmConfig
from vllm.lora.request import LoRARequest
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, resolve_kv_cache_block_sizes
from vllm.v1.kv_cache_interface import KVCacheConfig


class _Prompt:
    """As much of a request as vLLM's hasher looks at: what is hashed, up to ``num_tokens``."""

    mm_features: Sequence[Any] = ()
    prompt_embeds = None

    def __init__(self, token_ids: Sequence[int], cache_salt: str, adapter: tuple[str, ...]) -> None:
        self.all_token_ids = token_ids
        self.num_tokens = 0
        self.block_hashes: list[Any] = []
        self.cache_salt = cache_salt or None
        self.lora_request = LoRARequest(adapter[0], 1, adapter[1]) if adapter else None


class PromptHashes:
    """Of an engine. May be used on any one thread, and in a process that has no scheduler.

    Attributes:
        position_tokens: tokens of a chain position.
    """

    def __init__(self, algorithm: str, hash_tokens: int, position_tokens: int) -> None:
        """Nothing is hashed yet: the engine sets its seed later.

        Args:
            algorithm: vLLM's name of it.
            hash_tokens: of a block that vLLM hashes.
            position_tokens: a multiple of that.
        """
        self.position_tokens = position_tokens
        self._stride = position_tokens // hash_tokens
        self._function = get_hash_fn_by_name(algorithm)
        self._hasher = get_request_block_hasher(hash_tokens, self._function)

    def __call__(
        self,
        token_ids: Sequence[int],
        stop: int,
        hashes: list[bytes],
        cache_salt: str,
        adapter: tuple[str, ...],
    ) -> None:
        """Append hashes of further positions up to token ``stop``. O(tokens hashed)."""
        if not hasattr(kv_cache_utils, "NONE_HASH"):  # a worker's process, where vLLM hashes nothing
            kv_cache_utils.init_none_hash(self._function)
        prompt = _Prompt(token_ids, cache_salt, adapter)
        prompt.num_tokens = stop
        # Only the last one, and how many there are, counts for those that follow.
        prompt.block_hashes = [hashes[-1]] * (len(hashes) * self._stride) if hashes else []
        made = self._hasher(prompt)
        hashes += made[self._stride - 1 :: self._stride]


def hashes_of(vllm_config: VllmConfig, kv_cache_config: KVCacheConfig) -> PromptHashes:
    """As an engine makes them."""
    position_tokens, hash_tokens = resolve_kv_cache_block_sizes(kv_cache_config, vllm_config)
    return PromptHashes(vllm_config.cache_config.prefix_caching_hash_algo, hash_tokens, position_tokens)
