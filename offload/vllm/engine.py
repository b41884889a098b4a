"""vLLM's scheduler as an ``offload.scheduler.engine.Engine``."""

from collections.abc import Iterable, Iterator, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.v1.request import RequestStatus

from offload.messages import Ids
from offload.scheduler.engine import Drafts, GpuBlocks, State
from offload.scheduler.hints import RequestHints
from offload.vllm.request_hints import hints_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.request import Request

_STATES = {
    RequestStatus.WAITING_FOR_REMOTE_KVS: State.WAITS_FOR_KV,
    RequestStatus.PREEMPTED: State.PREEMPTED,
    RequestStatus.FINISHED_STOPPED: State.COMPLETED,
    RequestStatus.FINISHED_LENGTH_CAPPED: State.COMPLETED,
    RequestStatus.FINISHED_REPETITION: State.COMPLETED,
    RequestStatus.FINISHED_ABORTED: State.ABORTED,
}
_block_id = attrgetter("block_id")


def drafts_of(vllm_config: "VllmConfig", kv_cache_manager: "KVCacheManager") -> Drafts:
    """What vLLM's own prefix cache does because of drafts, so that the pool does the same.

    Whether the last block of a hit is dropped is up to vLLM's release and settings; its manager knows.
    """
    coordinator = kv_cache_manager.coordinator
    return Drafts(
        vllm_config.num_speculative_tokens,
        vllm_config.num_lookahead_tokens,
        int(coordinator.single_type_managers[0].use_eagle),
        coordinator.num_reprefillable_tokens,
    )


class VllmEngine:
    """Over a scheduler's KV cache manager, which has one group.

    vLLM's own ``touch`` and ``free_blocks`` loop over blocks, once per store.
    """

    def __init__(self, kv_cache_manager: "KVCacheManager", drafts: Drafts) -> None:
        self._manager = kv_cache_manager
        self.drafts = drafts
        self._pool = kv_cache_manager.block_pool
        self.num_blocks: int = self._pool.num_gpu_blocks
        self.num_spare: int = kv_cache_manager.watermark_blocks

    @property
    def num_free(self) -> int:
        """GPU blocks that nobody holds."""
        num_free: int = self._pool.get_num_free_blocks()
        return num_free

    def state(self, request: "Request") -> State:
        """Where the request stands."""
        return _STATES.get(request.status, State.OTHER)

    def hints(self, request: "Request") -> RequestHints:
        """What its client asked for. Never raises."""
        return hints_of(request)

    def table(self, request_id: str) -> GpuBlocks:
        """The blocks that a request has now, by chain position; none after a preemption."""
        blocks: GpuBlocks = self._manager.get_blocks(request_id).blocks[0]
        return blocks

    def blocks(self, block_ids: Ids) -> GpuBlocks:
        """Those with these ids."""
        return list(map(self._pool.blocks.__getitem__, block_ids.tolist()))

    def ids(self, blocks: Sequence[Any]) -> Ids:
        """Ids of blocks, ``int64[len(blocks)]``."""
        return np.fromiter(map(_block_id, blocks), dtype=np.int64, count=len(blocks))

    def hold(self, blocks: Sequence[Any]) -> None:
        """Keep blocks from reuse until they are released."""
        self._pool.touch(blocks)

    def release(self, blocks: Iterable[Any]) -> None:
        """End a hold on each. The first is the first to be reused."""
        self._pool.free_blocks(blocks)

    def num_holds(self, block_id: int) -> int:
        """How many hold that block."""
        num_holds: int = self._pool.blocks[block_id].ref_cnt
        return num_holds

    def num_free_of(self, hashes: Iterator[bytes]) -> int:
        """How many blocks of these prefix hashes the GPU has that nobody holds. O(these)."""
        find, group = self._pool.get_cached_block, [0]
        found = [find(prefix_hash, group) for prefix_hash in hashes]
        return sum(not blocks[0].ref_cnt for blocks in found if blocks)

    def share(self, request: "Request", num_tokens: int) -> None:
        """Give the leading blocks of a request to the GPU's prefix cache: ``num_tokens`` of it are there."""
        self._manager.cache_blocks(request, num_tokens)
