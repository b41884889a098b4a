"""Our eviction policy for those who stay on vLLM's own OffloadingConnector; see ``HazardCachePolicy``.

"eviction_policy": "HazardCachePolicy", "cache_policy_module_path": "offload.vllm.native_policy"
"""

from collections.abc import Iterable, Sequence
from typing import Any

from vllm.v1.kv_offload.base import OffloadKey, ReqContext
from vllm.v1.kv_offload.cpu.policies.base import CachePolicy, ChunkStatus

from evictor import HazardPolicy
from offload.vllm.native.ranked_segments import RankedSegments
from offload.vllm.native.request import NativeRequest
from offload.vllm.native.segments import num_common

__all__ = ["HazardCachePolicy"]


class HazardCachePolicy(CachePolicy):
    """A cache policy for vLLM's ``CPUOffloadingManager`` that asks ``evictor.HazardPolicy`` what to evict.

    It keeps keys that were stored together as segments, hanging from what comes before them in their chain,
    and evicts tails before heads. A chunk that is in use keeps those before it, too.

    A use is noted once per request: with its first miss, before anything is stored for it, else when it is
    over. So it is with every vLLM, though from 0.33 on ``on_request_access`` tells of the first hit, too. The
    whole prompt counts, as the scheduler has recorded the positions of all its keys by then; what is
    generated later counts as an answer. With several KV cache groups, which need not hold every chunk,
    only what is stored or asked to be counts. A key without a position is a segment of its own.

    Nothing is rejected, though our own connector rejects newcomers that are worth less than what is there. To
    reject would be to answer ``evict`` with None, for all chunks of the call at once. vLLM's scheduler then
    counts an allocation failure and writes a warning. It offers the same chunks and more in every step until
    the request is over. Instead they are let in as guests, which are evicted for the next ones. The cost is
    the space of one request.

    As in vLLM's own policies every call costs O(1) per key; not thread-safe.
    """

    def __init__(self, cache_capacity: int) -> None:
        super().__init__(cache_capacity)
        self.clear()

    def clear(self) -> None:
        """Forget everything, also what was learned."""
        self._chunks: dict[OffloadKey, ChunkStatus] = {}
        self._segments = RankedSegments(HazardPolicy(max(1, self.cache_capacity)))
        self._requests: dict[NativeRequest, None] = {}
        self._latest: NativeRequest | None = None
        # what vLLM says key by key is taken in when it says something else
        self._inserted: list[OffloadKey] = []
        self._inserted_busy: set[OffloadKey] = set()
        self._are_guests = False  # those inserted, or about to be
        self._removed: list[OffloadKey] = []

    def get(self, key: OffloadKey) -> ChunkStatus | None:
        return self._chunks.get(key)

    def insert(self, key: OffloadKey, chunk: ChunkStatus, req_context: ReqContext | None = None) -> None:
        """``req_context``: from vLLM 0.33 on. Not needed: the request was named when the chunk was missed."""
        self._chunks[key] = chunk
        self._inserted.append(key)
        if chunk.ref_cnt:
            self._inserted_busy.add(key)

    def remove(self, key: OffloadKey) -> None:
        if self._inserted:
            self._settle()
        del self._chunks[key]
        self._removed.append(key)

    def touch(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        self._note(list(keys), req_context)

    def on_store_miss(self, keys: Iterable[OffloadKey], req_context: ReqContext) -> None:
        self._note(list(keys), req_context)

    def on_request_finished(
        self,
        key_groups: Sequence[Sequence[OffloadKey]],
        insertion_only_keys: set[OffloadKey],
        reused_keys: set[OffloadKey],
        req_context: ReqContext,
    ) -> None:
        if self._known(req_context) is None:
            self._note([key for keys in key_groups for key in keys], req_context, is_over=True)
        else:
            self._settle()
        request = self._known(req_context)
        if request is not None:
            self._requests.pop(request, None)
            if request is self._latest:
                self._latest = None

    def mark_evictable(self, key: OffloadKey) -> None:
        if self._inserted or self._removed:
            self._settle()
        self._segments.set_idle(key)

    def mark_non_evictable(self, key: OffloadKey) -> None:
        if self._inserted or self._removed:
            self._settle()
        self._segments.set_busy(key)

    def evict(self, n: int, protected: set[OffloadKey]) -> list[tuple[OffloadKey, ChunkStatus]] | None:
        """See ``CachePolicy``. None also if enough is free, but comes before what is in use or protected."""
        self._settle()
        if not n:
            return []
        request = self._request_of(next(iter(protected), None))
        arrivals = [] if request is None else request.arrivals(protected)
        evicted = self._segments.evict(n, protected, arrivals)
        if evicted is None:
            return None
        self._are_guests = evicted.for_guests
        keys: list[Any] = evicted.keys
        return [(key, self._chunks.pop(key)) for key in keys]

    def check_invariants(self) -> None:
        """Chunks and segments agree. O(n); for tests."""
        self._settle()
        self._segments.check_invariants()
        assert all(key in self._segments for key in self._chunks), "a chunk is in no segment"
        assert len(self._chunks) == len(self._segments), (
            f"{len(self._segments)} keys, not {len(self._chunks)}"
        )

    def _known(self, context: ReqContext) -> NativeRequest | None:
        request: NativeRequest | None = context.get_state(NativeRequest)
        return request if request is not None and request.segments is self._segments else None

    def _note(self, keys: list[OffloadKey], context: ReqContext, *, is_over: bool = False) -> None:
        """A request asks for ``keys``, and for all that is recorded of it: a use, if not noted before."""
        self._settle()
        if not keys:
            return
        request = self._known(context)
        is_first = request is None
        if request is None:
            request = NativeRequest(self._segments, context)
            context.set_state(request)
            self._requests[request] = None
        self._latest = request
        request.follow()
        if request.is_plain:
            if is_first and keys[-1] in request.positions:
                chain, last = request.place(keys[-1])
                asked = chain.keys[: last + 1] if is_over else chain.keys
                chain.num_here = self._segments.use(asked)
                return
            if all(key in request.positions for key in keys):
                return
        self._note_sparse(request, keys, is_first)

    def _note_sparse(self, request: NativeRequest, keys: list[OffloadKey], is_first: bool) -> None:
        """The same of a request whose chains may have holes: what is here, or asked for now, counts."""
        named = set(keys)
        for key in keys:
            if key not in request.positions:
                self._segments.use([key])
        for chain in request.chains.values():
            asked = [key for key in chain.keys if key in named or (is_first and key in self._segments)]
            if not is_first:
                asked = [key for key in asked if request.positions[key] <= request.num_prompt_tokens]
            if asked:
                self._segments.use(asked)

    def _request_of(self, key: OffloadKey | None) -> NativeRequest | None:
        """A request that names ``key``, the one noted last if it does."""
        if key is None:
            return None
        if self._latest is None or key not in self._latest.positions:
            self._latest = next((each for each in self._requests if key in each.positions), None)
        return self._latest

    def _settle(self) -> None:
        """Take in what was removed and inserted."""
        if self._removed:
            self._segments.discard(self._removed)
            self._removed = []
        keys, self._inserted = self._inserted, []
        stop = 0
        while stop < len(keys):
            start, stop = stop, stop + 1
            request = self._request_of(keys[start])
            if request is None:
                self._segments.append(keys[start:stop], None, None, self._inserted_busy)
                continue
            request.follow()
            chain, place = request.place(keys[start])
            rest = keys[start:] if start else keys
            size = num_common(chain.keys[place : place + len(rest)], rest, 0)
            stop = start + size
            chain.num_here = place + size
            before = chain.keys[place - 1] if place else None
            after = chain.keys[chain.num_here] if chain.num_here < len(chain.keys) else None
            self._segments.append(rest[:size], before, after, self._inserted_busy, self._are_guests)
        if keys:
            self._inserted_busy = set()
        self._are_guests = False
