"""LoRA adapters that are loaded again in place: KV of their old weights is neither served nor kept."""

from collections.abc import Hashable
from typing import TYPE_CHECKING

from allocator import CpuOffloadingBlockAllocator

if TYPE_CHECKING:
    from vllm.v1.request import Request

_SMALLEST_PRUNING = 1024


class Adapters:
    """What the pool holds under which LoRA adapter, and which adapters are being loaded again.

    vLLM's prefix hashes hold an adapter's name and path, not its weights. A request with
    ``lora_request.load_inplace`` has a worker load them again in each of its steps. So from its admission to
    its end nothing under that adapter is stored or restored, and what was stored before is forgotten.
    Requests are of one adapter if they have its name or its id in common: a worker replaces adapters by id.

    Memory: the first prefix hash of each chain that the pool holds under an adapter, twice that at most.
    """

    def __init__(self, allocator: CpuOffloadingBlockAllocator) -> None:
        """``allocator``: of the pool."""
        self._allocator = allocator
        self._roots: dict[Hashable, _Roots] = {}  # by name and by id
        self._reloading: dict[str, frozenset[Hashable]] = {}  # by request: names and ids
        self._reloaded: set[Hashable] = set()  # ever

    def may_load(self, request: "Request") -> bool:
        """Whether KV in the pool is of the weights that ``request`` will be computed with. O(1).

        While another request has them loaded again the pool holds none.
        """
        return not _reloads(request)

    def may_store(self, request: "Request", num_local: int) -> bool:
        """Whether KV of an admitted request is of weights that stay, its first ``num_local`` blocks included.

        These come from the GPU's own prefix cache, which vLLM does not empty for an adapter: they are right
        if the pool knows them too.
        """
        names = _names(request)
        if not names or self._reloaded.isdisjoint(names):
            return True
        is_known = self._allocator.known_depth(request.block_hashes, num_local) == num_local
        return is_known and not self._is_reloading(names)

    def admit(self, request: "Request") -> bool:
        """``request`` is scheduled. Returns whether its adapter is loaded again.

        Then all chains under that adapter have left the pool, also those on their way into it.
        """
        if not _reloads(request):
            return False
        names = self._reloading[request.request_id] = _names(request)
        self._reloaded |= names
        for root in {root for name in names if name in self._roots for root in self._roots.pop(name)}:
            self._allocator.forget(root)
        return True

    def finish(self, request_id: str) -> None:
        """That request is over."""
        self._reloading.pop(request_id, None)

    def stored(self, request: "Request") -> None:
        """A store of a chain of ``request`` has begun. Amortized O(log n)."""
        for name in _names(request):
            self._roots.setdefault(name, _Roots()).add_known(request.block_hashes[0], self._allocator)

    def share_one(self, request: "Request", other: "Request") -> bool:
        """Whether two requests are of one adapter."""
        return not _names(request).isdisjoint(_names(other))

    def check_invariants(self) -> None:
        """Who loads an adapter again is known to have done so, and nothing is stored under it meanwhile."""
        for request_id, names in self._reloading.items():
            assert names <= self._reloaded, f"{request_id} loads {names} again, known are {self._reloaded}"
            held = names & self._roots.keys()
            assert not held, f"chains of {held} were stored while {request_id} loads it again"

    def _is_reloading(self, names: frozenset[Hashable]) -> bool:
        return not all(map(names.isdisjoint, self._reloading.values()))


class _Roots(set[bytes]):
    """First prefix hashes of chains. Those that the pool has lost are dropped before they are the most."""

    limit = _SMALLEST_PRUNING

    def add_known(self, root: bytes, allocator: CpuOffloadingBlockAllocator) -> None:
        """Remember one that ``allocator`` knows."""
        self.add(root)
        if len(self) > self.limit:
            self.intersection_update([each for each in self if allocator.known_depth([each], 1)])
            self.limit = max(2 * len(self), _SMALLEST_PRUNING)


def _reloads(request: "Request") -> bool:
    return request.lora_request is not None and request.lora_request.load_inplace


def _names(request: "Request") -> frozenset[Hashable]:
    lora = request.lora_request
    return frozenset() if lora is None else frozenset((lora.lora_name, lora.lora_int_id))
