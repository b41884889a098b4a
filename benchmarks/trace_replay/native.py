"""vLLM's own CPU pool with any of its cache policies, unmodified, called as its offloading scheduler does.

For a request, `vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler` calls the manager with the
keys of its full blocks: `on_new_request`; `lookup` of one after the other until a miss; `prepare_load` of the
hits, and `complete_load` when they are copied; `prepare_store` of all keys after the hits, and
`complete_store` of those it took; `on_request_finished`. Completions come with sets of keys. When
`prepare_store` answers None, nothing of the request is stored.

What differs from an engine: a prompt is stored at once, as if computed in one step (with our pool too). An
engine that computes it in parts asks to store each of them. That matters for prompts larger than the pool:
stored at once they are refused, in parts they push out their own beginning.

A request does not protect its hits: until `on_request_finished` their recency is that of the request before.
So storing the rest may evict the end of the request's own prefix, and then the rest cannot be hit. That is
how vLLM's LRU differs from our leaf-LRU. With `offers_hits`, `prepare_store` gets the hits too, and protects
them: that is how vLLM calls it for a request whose prefix was on the GPU and not loaded.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

from vllm.v1.kv_offload.base import LookupResult, OffloadKey, ReqContext, make_offload_key
from vllm.v1.kv_offload.cpu.manager import CPUOffloadingManager
from vllm.v1.kv_offload.cpu.policies.factory import CachePolicyFactory

__all__ = ["NativePool", "check_policy"]

_GROUP = 0
"""A plain model has one KV cache group."""


def check_policy(name: str, module: str | None) -> None:
    """Load the class.

    Raises:
        ValueError: there is no such policy; the message says what is wrong.
    """
    try:
        CachePolicyFactory.get_cache_policy_cls(name, module)
    except (ImportError, AttributeError) as error:
        raise ValueError(str(error)) from None
    except AssertionError:
        raise ValueError(f"{name} of {module} is not a CachePolicy of vLLM's") from None


class NativePool:
    """vLLM's `CPUOffloadingManager`; see ``benchmarks.trace_replay.replay.Pool`` for what is measured.

    Args:
        capacity: in blocks.
        policy: as in `cache_policy`: one of vLLM's names, or the name of a class.
        module: as in `cache_policy_module_path`: where that class is; None for vLLM's own.
        offers_hits: whether a request's hits are offered to be stored, too.
    """

    def __init__(
        self, capacity: int, policy: str, module: str | None = None, *, offers_hits: bool = False
    ) -> None:
        self._offers_hits = offers_hits
        self.manager = CPUOffloadingManager(
            num_chunks=capacity, cache_policy=policy, cache_policy_module_path=module
        )
        self._numbers = count()
        self._keys: list[OffloadKey] = []
        self._num_hits = 0
        self._stored: set[OffloadKey] = set()
        self._context: ReqContext

    def begin(self, chain: Sequence[bytes]) -> None:
        """Keys and their positions are the scheduler's work, here and in vLLM."""
        self._keys = [make_offload_key(each, _GROUP) for each in chain]
        self._context = ReqContext(req_id=str(next(self._numbers)))
        for position, key in enumerate(self._keys, 1):
            self._context.set_offload_key_position(key, position)

    def find(self) -> int:
        manager, context = self.manager, self._context
        manager.on_new_request(context)
        self._num_hits = 0
        for key in self._keys:
            if manager.lookup(key, context) is not LookupResult.HIT:
                break
            self._num_hits += 1
        if self._num_hits:
            loaded = self._keys[: self._num_hits]
            manager.prepare_load(loaded, context)
            manager.complete_load(set(loaded), context)
        return self._num_hits

    def store(self) -> int:
        self._stored = set()
        offered = self._keys if self._offers_hits else self._keys[self._num_hits :]
        if not offered:
            return 0
        output = self.manager.prepare_store(offered, self._context)
        if output is None:
            return 0
        self._stored = set(output.keys_to_store)
        return len(output.evicted_keys)

    def finish(self) -> None:
        if self._stored:
            self.manager.complete_store(self._stored, self._context)
        self.manager.on_request_finished(self._context)
