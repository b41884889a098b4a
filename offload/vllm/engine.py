"""vLLM's scheduler as an ``offload.scheduler.engine.Engine``."""

import sys
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from itertools import pairwise, repeat
from operator import add, attrgetter, eq
from typing import TYPE_CHECKING, Any, overload

import numpy as np
from vllm.v1.core import kv_cache_utils
from vllm.v1.request import RequestStatus

from offload.messages import Ids
from offload.scheduler.engine import Drafts, Origin, Remains, State, States
from offload.scheduler.groups import GpuBlocks, Groups
from offload.scheduler.hints import RequestHints
from offload.scheduler.spelling import Spelling
from offload.transfer_params import KVTransferParams
from offload.vllm.groups import cached_groups
from offload.vllm.request_hints import hints_of

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.request import Request

_STATES = {
    RequestStatus.WAITING_FOR_REMOTE_KVS: State.WAITS_FOR_KV,
    RequestStatus.PREEMPTED: State.PREEMPTED,
    RequestStatus.FINISHED_STOPPED: State.COMPLETED,
    RequestStatus.FINISHED_LENGTH_CAPPED: State.COMPLETED,
    RequestStatus.FINISHED_REPETITION: State.COMPLETED,
    RequestStatus.FINISHED_ABORTED: State.ABORTED,
}
_CUT = (
    RequestStatus.FINISHED_LENGTH_CAPPED,
    RequestStatus.FINISHED_REPETITION,
    RequestStatus.FINISHED_ABORTED,
)
_TELLING_TOKENS = 2
"""At the end of an answer: what ends it, and what it says last, such as that of a tool call."""
_block_id = attrgetter("block_id")
_block_hash = attrgetter("block_hash")
_num_holds = attrgetter("ref_cnt")

_as_told = getattr(kv_cache_utils, "to_event_extra_keys", list)  # some releases hash them as they are told
_ENDING = "_handle_shutdown"
"""Of vLLM's engine core: asks for work only when it has been told to end."""
_FRAMES = 8
"""Between that and us, at most."""


def drafts_of(vllm_config: "VllmConfig", kv_cache_manager: "KVCacheManager") -> Drafts:
    """What vLLM's own prefix cache does because of drafts, so that the pool does the same.

    Whether the last block of a hit is dropped is up to vLLM's release and settings; its manager knows.
    """
    coordinator = kv_cache_manager.coordinator
    return Drafts(
        vllm_config.num_speculative_tokens,
        vllm_config.num_lookahead_tokens,
        int(any(manager.use_eagle for manager in coordinator.single_type_managers)),
        coordinator.num_reprefillable_tokens,
    )


class _PositionHashes(Sequence[bytes]):
    """Hashes of chain positions that are several hashed blocks long: each is that of its last one."""

    def __init__(self, hashes: list[bytes], stride: int) -> None:
        self._hashes = hashes
        self._stride = stride

    def __len__(self) -> int:
        return len(self._hashes) // self._stride

    @overload
    def __getitem__(self, index: int) -> bytes: ...
    @overload
    def __getitem__(self, index: slice) -> list[bytes]: ...
    def __getitem__(self, index: int | slice) -> bytes | list[bytes]:
        if isinstance(index, int):
            at = index if index >= 0 else len(self) + index
            return self._hashes[(at + 1) * self._stride - 1]
        start, stop, step = index.indices(len(self))
        assert step > 0, f"positions are taken from the first on, not in steps of {step}"
        return self._hashes[(start + 1) * self._stride - 1 : stop * self._stride : step * self._stride]


class VllmEngine:
    """Over a scheduler's KV cache manager.

    vLLM's own ``touch`` and ``free_blocks`` loop over blocks, once per store.
    """

    def __init__(self, kv_cache_manager: "KVCacheManager", drafts: Drafts, groups: Groups) -> None:
        self._manager = kv_cache_manager
        self.drafts = drafts
        self._pool = kv_cache_manager.block_pool
        self.groups = groups
        self._group_ids = cached_groups(kv_cache_manager.kv_cache_config)
        self._group_key: bytes = kv_cache_utils.make_block_hash_with_group_id(b"", self._group_ids[0])
        self._hash_stride: int = self.groups.position_tokens // self._pool.hash_block_size
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

    def ending(self, request: "Request") -> Hashable | None:
        """How its answer ended: the last token ids where the model ended it, otherwise what did. O(1).

        Where it was cut the last tokens are any. A stop string is told as an abort: vLLM finds it in another
        process. None: it wrote nothing, or a fault ended it.
        """
        if not request.num_output_tokens:
            return None
        if request.status == RequestStatus.FINISHED_STOPPED:
            return tuple(request.output_token_ids[-_TELLING_TOKENS:])
        return request.status.name if request.status in _CUT else None

    def hints(self, request: "Request") -> RequestHints:
        """What its client asked for. Never raises."""
        return hints_of(request)

    def transfer_params(self, request: "Request") -> KVTransferParams:
        """What it says of hand-offs. Never raises."""
        return KVTransferParams.read(request.kv_transfer_params)

    def origin(self, request: "Request") -> Origin:
        """What its prompt begins with. O(tokens of a position). A salt is told by its hash alone."""
        ids, salt, adapter = request.prompt_token_ids, request.cache_salt, request.lora_request
        tokens = None if ids is None else hash(tuple(ids[: self.groups.position_tokens]))
        return Origin(tokens, hash(salt) if salt else 0, "" if adapter is None else adapter.lora_name)

    def chain(self, request: "Request") -> Sequence[bytes]:
        """Prefix hashes of a request's chain positions; grows with the request."""
        hashes: list[bytes] = request.block_hashes
        return hashes if self._hash_stride == 1 else _PositionHashes(hashes, self._hash_stride)

    def spelled(self, request: "Request", start: int, stop: int) -> Spelling | None:
        """What the hashes of these positions are made of. Extra keys are as vLLM's own events have them."""
        size = self.groups.position_tokens
        token_ids: list[int] = request.all_token_ids[start * size : stop * size]
        if len(token_ids) != (stop - start) * size:
            return None
        keys, lora = None, request.lora_request
        if lora or request.mm_features or request.cache_salt or request.prompt_embeds is not None:
            keys_of = kv_cache_utils.generate_block_hash_extra_keys
            found, feature = [], 0
            for ends in pairwise(range(start * size, (stop + 1) * size, size)):
                each, feature = keys_of(request, *ends, feature)
                found.append(each)
            keys = _as_told(found)
        if keys is not None and not any(keys):
            keys = None
        if lora is None:
            return Spelling(token_ids, size, keys)
        return Spelling(token_ids, size, keys, lora.adapter_id, lora.name)

    def remains(self, request: "Request", *, is_spelled: bool) -> "Request | Remains":
        """What is read of a request that is over. Its images go, and its tokens unless they are spelled."""
        if not is_spelled:
            return Remains(request.request_id, request.lora_request)
        remains = copy(request)
        remains.mm_features = [replace(each, data=None) for each in request.mm_features]
        return remains

    def tables(self, request_id: str) -> Sequence[GpuBlocks]:
        """The blocks that a request has now, by cache group; none after a preemption."""
        tables: Sequence[GpuBlocks] = self._manager.get_blocks(request_id).blocks
        return tables if len(tables) == len(self._group_ids) else [tables[index] for index in self._group_ids]

    def mean_depth(self, step: "SchedulerOutput") -> float | None:
        """How many tokens are before those that this step computes, in the mean. O(requests).

        None: most of them are of answers, so the step says nothing about prefill.
        """
        num_tokens, cached = step.num_scheduled_tokens, step.scheduled_cached_reqs
        num_of_answer = 1 + self.drafts.num_tokens
        num_prefill = sum(num for num in num_tokens.values() if num > num_of_answer)
        if 2 * num_prefill < step.total_num_scheduled_tokens:
            return None
        begun = [(new.req_id, new.num_computed_tokens) for new in step.scheduled_new_reqs]
        begun += zip(cached.req_ids, cached.num_computed_tokens, strict=True)
        total = sum(num_tokens[each] * (before + num_tokens[each] / 2) for each, before in begun)
        mean: float = total / step.total_num_scheduled_tokens
        return mean

    def states(self, step: "SchedulerOutput") -> Mapping[str, Mapping[int, States]]:
        """Blocks that hold states once this step has run, by request and number of tokens."""
        offloads = getattr(step.kv_connector_block_state, "boundary_state_offloads", None) or {}
        states: dict[str, dict[int, dict[int, Any]]] = {}
        for request_id, entries in offloads.items():
            of_request = states.setdefault(request_id, {})
            for group_id, block_id, num_tokens in entries:
                of_depth = of_request.setdefault(num_tokens, {})
                of_depth[self._group_ids.index(group_id)] = self._pool.blocks[block_id]
        return states

    def branch(self, request: "Request") -> int:
        """Tokens up to where the GPU's prefix cache, or ``retain``, has seen others go; 0: not known."""
        num_tokens: int = request.shared_prefix_boundary
        return num_tokens

    def retain(self, request: "Request", num_tokens: int) -> None:
        """Have the GPU's prefix cache keep what it takes to go on there, and compute a step up to there.

        vLLM sets the number anew at each of its own lookups, before it asks the connector.
        """
        request.shared_prefix_boundary = max(request.shared_prefix_boundary, num_tokens)

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

    def release_before(self, blocks: Iterable[Any], other: Any) -> None:
        """The same, of blocks that are to be reused right before ``other``, which nobody holds.

        vLLM itself has no place but the two ends of its queue. If ``other`` is not in it, they go to its end.
        """
        queue, before = self._pool.free_block_queue, other.prev_free_block
        if before is None:
            self.release(blocks)
            return
        for block in blocks:
            block.ref_cnt -= 1
            if not block.ref_cnt and not block.is_null:
                before.next_free_block, block.prev_free_block = block, before
                before = block
                queue.num_free_blocks += 1
        before.next_free_block, other.prev_free_block = other, before

    def num_holds(self, block_id: int) -> int:
        """How many hold that block."""
        num_holds: int = self._pool.blocks[block_id].ref_cnt
        return num_holds

    def holds_of(self, blocks: Sequence[Any]) -> Ids:
        """How many hold each of these blocks, ``int64[len(blocks)]``. O(these), in C."""
        return np.fromiter(map(_num_holds, blocks), dtype=np.int64, count=len(blocks))

    def num_free_of(self, hashes: Iterator[bytes]) -> int:
        """How many blocks of these prefix hashes the GPU has that nobody holds. O(these)."""
        find, group = self._pool.get_cached_block, self._group_ids[:1]
        found = [find(prefix_hash, group) for prefix_hash in hashes]
        return sum(not blocks[0].ref_cnt for blocks in found if blocks)

    def num_intact(self, blocks: Sequence[Any], hashes: Sequence[bytes]) -> int:
        """How many leading ones of these blocks the prefix cache has under these hashes. O(these), in C."""
        same = list(map(eq, map(_block_hash, blocks), map(add, hashes, repeat(self._group_key))))
        return same.index(False) if False in same else len(same)

    def is_intact(self, block: Any, prefix_hash: bytes) -> bool:
        """Whether the prefix cache has this block under that hash. O(1)."""
        is_intact: bool = block.block_hash == prefix_hash + self._group_key
        return is_intact

    def has(self, prefix_hash: bytes) -> bool:
        """Whether its prefix cache has the block of full attention with that hash."""
        return self._pool.get_cached_block(prefix_hash, self._group_ids[:1]) is not None

    def gives(self, prefix_hash: bytes, block: Any) -> bool:
        """Whether its prefix cache gives no block of full attention with that hash but this one to others."""
        found = self._pool.get_cached_block(prefix_hash, self._group_ids[:1])
        return not found or found[0] is block

    @property
    def num_cached_blocks(self) -> int:
        """Prefix hashes that the prefix cache has; it may have several blocks of one."""
        return len(self._pool.cached_block_hash_to_block)

    @property
    def next_free(self) -> int | None:
        """The id of the free block that is taken next; None: there is none."""
        first = self._first_free
        return None if first is None else first.block_id

    @property
    def next_unhashed(self) -> int | None:
        """The id of the free block that is taken next; None if the prefix cache has it, or there is none."""
        first = self._first_free
        return None if first is None or first.block_hash is not None else first.block_id

    def free_ids(self) -> Ids:
        """Ids of all free blocks, in the order in which they are taken. O(blocks), a loop: not for steps."""
        blocks = self._pool.free_block_queue.get_all_free_blocks()
        return np.fromiter((block.block_id for block in blocks), dtype=np.int64, count=len(blocks))

    @property
    def _first_free(self) -> Any:
        """The free block that is taken next; None: there is none."""
        queue = self._pool.free_block_queue
        first = queue.fake_free_list_head.next_free_block
        return None if first is queue.fake_free_list_tail else first

    def is_ending(self) -> bool:
        """Asked while vLLM asks whether there is work: its engine core does so in one place as it shuts down.

        It tells connectors nothing of that. Where the place has another name, nothing is spilled at the end.
        """
        frame = sys._getframe(1)
        for _ in range(_FRAMES):
            if frame.f_code.co_name == _ENDING:
                return True
            if frame.f_back is None:
                break
            frame = frame.f_back
        return False

    def share(self, request: "Request", num_tokens: int) -> None:
        """Give the leading blocks of a request to the GPU's prefix cache: ``num_tokens`` of it are there."""
        self._manager.cache_blocks(request, num_tokens)
