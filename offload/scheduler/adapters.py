"""LoRA adapters that are loaded again in place: KV of their old weights is neither served nor kept."""

from collections import deque
from collections.abc import Hashable, Iterable, Sequence

from allocator import CpuOffloadingBlockAllocator
from offload.scheduler.engine import Engine, Request

_LOOKED_AT = 2
"""Roots looked at for each that is added: no fewer are dropped than added once half of them are lost."""


class Adapters:
    """What the pool holds under which LoRA adapter, and which adapters are being loaded again.

    vLLM's prefix hashes hold an adapter's name and path, not its weights. A request with
    ``lora_request.load_inplace`` has a worker load them again in each of its steps. So from its admission to
    its end nothing under that adapter is stored or restored, and what was stored before is forgotten.
    Requests are of one adapter if they have its name or its id in common: a worker replaces adapters by id.

    Memory: the first prefix hash of each chain that the pool holds under an adapter, for its name and its id.
    With those that the pool has lost they are about twice as many in the long run.
    """

    def __init__(self, allocator: CpuOffloadingBlockAllocator, engine: Engine) -> None:
        """``allocator``: of the pool; ``engine``: whose requests these are."""
        self._allocator = allocator
        self._engine = engine
        self._roots = _Roots(allocator)
        self._reloading: dict[str, frozenset[Hashable]] = {}  # by request: names and ids
        self._reloaded: set[Hashable] = set()  # ever

    def may_load(self, request: Request) -> bool:
        """Whether KV in the pool is of the weights that ``request`` will be computed with. O(1).

        While another request has them loaded again the pool holds none.
        """
        return not _reloads(request)

    def may_store(self, request: Request, num_local: int) -> bool:
        """Whether KV of an admitted request is of weights that stay, its first ``num_local`` blocks included.

        These come from the GPU's own prefix cache, which vLLM does not empty for an adapter: they are right
        if the pool has them too, with slots. Not with windows or states: there a hit may end before old
        blocks of full attention, which then lie beside new ones of the same hashes. O(1), or O(blocks of the
        request) where its adapter was ever loaded again.
        """
        names = _names(request)
        if not names or self._reloaded.isdisjoint(names):
            return True
        if request.skip_reading_prefix_cache:  # the GPU may have old blocks of the same hashes
            return False
        if self._engine.groups.has_bags:
            return not num_local and not self._is_reloading(names)
        if self._is_reloading(names) or self._others_are_given_others(request, num_local):
            return False
        return not self._allocator.hollow.lacking(self._engine.chain(request), 0, num_local).any()

    def admit(self, request: Request) -> bool:
        """``request`` is scheduled. Returns whether its adapter is loaded again.

        Then all chains under that adapter have left the pool, also those on their way into it.
        """
        if not _reloads(request):
            return False
        names = self._reloading[request.request_id] = _names(request)
        self._reloaded |= names
        for root in self._roots.take(names):
            self._allocator.forget(root)
        return True

    def finish(self, request_id: str) -> None:
        """That request is over."""
        self._reloading.pop(request_id, None)

    def stored(self, request: Request, chain: Sequence[bytes]) -> None:
        """A store of that chain of ``request``, which may be over, has begun. O(1)."""
        for name in _names(request):
            self._roots.add(name, chain[0])

    def share_one(self, request: Request, other: Request) -> bool:
        """Whether two requests are of one adapter."""
        return not _names(request).isdisjoint(_names(other))

    def check_invariants(self) -> None:
        """Who loads an adapter again is known to have done so, and nothing is stored under it meanwhile."""
        self._roots.check_invariants()
        for request_id, names in self._reloading.items():
            assert names <= self._reloaded, f"{request_id} loads {names} again, known are {self._reloaded}"
            held = self._roots.names & names
            assert not held, f"chains of {held} were stored while {request_id} loads it again"

    def _others_are_given_others(self, request: Request, num_local: int) -> bool:
        """Whether requests are given other blocks of those hashes that this one computes, maybe old ones.

        So it is with the last block of a prompt that the GPU had whole, which is computed all the same. The
        new one would prove nothing of what others are given.
        """
        engine, chain = self._engine, self._engine.chain(request)
        tables = engine.tables(request.request_id)
        num_there = min(engine.groups.num_positions(tables), len(chain))
        own = engine.groups.prefix(tables, range(num_local, num_there))[:: engine.groups.columns]
        are_given = all(map(engine.gives, chain[num_local:num_there], own))
        return not are_given or any(map(engine.has, chain[num_there:]))

    def _is_reloading(self, names: frozenset[Hashable]) -> bool:
        return not all(map(names.isdisjoint, self._reloading.values()))


class _Roots:
    """First prefix hashes of chains, by name or id. Those that the pool lost are dropped bit by bit."""

    def __init__(self, allocator: CpuOffloadingBlockAllocator) -> None:
        self._allocator = allocator
        self._by_name: dict[Hashable, set[bytes]] = {}
        self._line: deque[tuple[Hashable, set[bytes], bytes]] = deque()  # the first is looked at next

    @property
    def names(self) -> frozenset[Hashable]:
        return frozenset(self._by_name)

    def add(self, name: Hashable, root: bytes) -> None:
        """Remember a root that the pool knows. O(1)."""
        roots = self._by_name.setdefault(name, set())
        if root in roots:
            return
        roots.add(root)
        self._line.append((name, roots, root))
        for _ in range(min(_LOOKED_AT, len(self._line) - 1)):
            self._look_at_first()

    def take(self, names: Iterable[Hashable]) -> set[bytes]:
        """Remove and return all of these names. O(these). Their places in line end when it is their turn."""
        return set().union(*(self._by_name.pop(name) for name in names if name in self._by_name))

    def check_invariants(self) -> None:
        """What is remembered stands in line once."""
        named = [(name, root) for name, roots in self._by_name.items() for root in roots]
        in_line = [(name, root) for name, roots, root in self._line if self._by_name.get(name) is roots]
        assert sorted(map(repr, named)) == sorted(map(repr, in_line)), f"{len(named)}, {len(in_line)}"
        assert all(self._by_name.values()), "a name without roots is remembered"

    def _look_at_first(self) -> None:
        name, roots, root = self._line.popleft()
        if self._by_name.get(name) is not roots:
            return
        if self._allocator.known_depth([root], 1):
            self._line.append((name, roots, root))
            return
        roots.discard(root)
        if not roots:
            del self._by_name[name]


def _reloads(request: Request) -> bool:
    return request.lora_request is not None and request.lora_request.load_inplace


def _names(request: Request) -> frozenset[Hashable]:
    lora = request.lora_request
    return frozenset() if lora is None else frozenset((lora.lora_name, lora.lora_int_id))
