"""What a cache policy of vLLM's native pool can know of a request: its keys in order."""

from itertools import islice

from vllm.v1.kv_offload.base import OffloadKey, ReqContext

from offload.vllm.native.ranked_segments import RankedSegments
from offload.vllm.native.segments import Arrival

__all__ = ["NativeChain", "NativeRequest"]

_GROUP_BYTES = 4  # at the end of a key: which KV cache group it is of


class NativeChain:
    """The keys of a request in one KV cache group, in order; the first ``num_here`` were here lately."""

    __slots__ = ("keys", "num_here")

    def __init__(self) -> None:
        self.keys: list[OffloadKey] = []
        self.num_here = 0


class NativeRequest:
    """What is known of one request of vLLM's, between its first use of the cache and its end.

    Attributes:
        segments: in which it was noted; others are those after a reset.
        positions: of its keys, as vLLM's scheduler goes on to record them: how many tokens end there.
        chains: by group.
        is_plain: whether there is one group, so that a chain is complete.
    """

    __slots__ = ("_num_seen", "chains", "is_plain", "num_prompt_tokens", "positions", "segments")

    def __init__(self, segments: RankedSegments, context: ReqContext) -> None:
        self.segments = segments
        self.positions: dict[OffloadKey, int] = getattr(context, "_offload_key_positions", {})
        self.chains: dict[bytes, NativeChain] = {}
        self._num_seen = 0
        self.follow()
        self.is_plain = len(self.chains) == 1
        self.num_prompt_tokens = max(self.positions.values(), default=0)

    def follow(self) -> None:
        """Take in the keys that were recorded since the last time. O(those)."""
        num_new = len(self.positions) - self._num_seen
        if not num_new:
            return
        self._num_seen += num_new
        new = list(islice(reversed(self.positions), num_new))[::-1]
        groups = {key[-_GROUP_BYTES:] for key in new}
        for group in groups:
            chain = self.chains.setdefault(group, NativeChain())
            chain.keys += new if len(groups) == 1 else [key for key in new if key[-_GROUP_BYTES:] == group]

    def place(self, key: OffloadKey) -> tuple[NativeChain, int]:
        """Where ``key``, which has a position, is in its chain."""
        chain = self.chains[key[-_GROUP_BYTES:]]
        place = self.positions[key] // self.positions[chain.keys[0]] - 1
        if not (0 <= place < len(chain.keys) and chain.keys[place] == key):
            place = chain.keys.index(key)
        return chain, place

    def arrivals(self, offered: set[OffloadKey]) -> list[Arrival]:
        """What of ``offered`` is not here and will be; of a chain whose next key is not offered, nothing."""
        self.follow()
        arrivals = []
        for chain in self.chains.values():
            start = chain.num_here
            while start < len(chain.keys) and chain.keys[start] in self.segments:
                start += 1
            if start < len(chain.keys) and chain.keys[start] in offered:
                keys = chain.keys[start : start + len(offered)]
                arrivals.append(Arrival(chain.keys[start - 1] if start else None, keys))
        return arrivals
