"""Plans stores: what of a chain is new, where it goes, and what leaves for it."""

from collections.abc import Sequence

from allocator.errors import ChainError
from allocator.node import Node, Place
from allocator.plans import Note, StorePlan
from allocator.prefix_tree import PrefixTree
from allocator.ranking import Ranking
from allocator.room import Room
from allocator.slot_pool import SlotPool, Slots
from allocator.store_plans import StorePlans
from evictor import EvictionPolicy, KeepHints


class Planning:
    """Hangs positions, and bags, into the tree that are to be filled. It has no state of its own."""

    def __init__(
        self,
        tree: PrefixTree,
        ranking: Ranking,
        pool: SlotPool,
        policy: EvictionPolicy[Node],
        room: Room,
        stores: StorePlans,
    ) -> None:
        self._tree = tree
        self._ranking = ranking
        self._pool = pool
        self._policy = policy
        self._room = room
        self._stores = stores

    def plan(
        self,
        chain: Sequence[bytes],
        stop: int,
        limit: int | None,
        hints: KeepHints | None,
        num_bag: int | None,
        must: bool,
        note: Note | None,
    ) -> StorePlan | None:
        """See ``CpuOffloadingBlockAllocator.plan_store``. What leaves, leaves for ``departures.whom``."""
        plan = self._plan(chain, stop, limit, hints, num_bag, must, note)
        self._room.departures.whom = ""
        return plan

    def room_for(self, num_slots: int, node: Node, *, is_tail: bool) -> int:
        """Evict for so many slots of positions of ``node``; returns how many of them can be had now.

        Nothing is evicted any more once they are worth least, if they are its tail. Others need them if not:
        then they stay out where requests have asked for that.
        """
        while self._pool.num_free < num_slots and not (is_tail and self._is_coldest(node)):
            if not self._tree.has_dead and (self._policy.choose() is None or self._policy.stays_out(node)):
                break
            self._room.make(num_slots, None, self._policy, most_bites=1)
        self._room.departures.whom = ""
        return min(num_slots, self._pool.num_free)

    # Private

    def _is_coldest(self, leaf: Node) -> bool:
        """Whether it would go next if nothing kept it."""
        self._policy.enter(leaf)
        coldest = self._policy.choose()
        self._policy.leave(leaf)
        return coldest is leaf

    def _plan(
        self,
        chain: Sequence[bytes],
        stop: int,
        limit: int | None,
        hints: KeepHints | None,
        num_bag: int | None,
        must: bool,
        note: Note | None,
    ) -> StorePlan | None:
        place = self._tree.find(chain, stop)
        wanted = min(stop - place.depth, stop if limit is None else limit)
        if num_bag is not None and (place.depth + wanted < stop or not self._lacks_bag(place, wanted)):
            num_bag = None
        if wanted < 0 or (not wanted and num_bag is None):
            return None
        num_slots = wanted * self._tree.columns + (num_bag or 0)
        if not self._room.may_be_made(num_slots, place):
            return None
        node = self._ranking.node_ending_at(place) if wanted else place.node
        self._policy.leave(node)
        admission = self._ranking.heed(node, hints, num_slots)
        hashes = list(chain[place.depth : place.depth + wanted])
        data = self._tree.packed(hashes) if hashes else b""
        num_stored = self._room.admit(node, hashes, num_bag or 0, admission, must=must)
        if num_stored is None:
            self._ranking.refresh(node)
            self._room.trim_loose()
            return None
        # Whoever notes may fail, and nothing has changed yet.
        told = None if note is None else note(place.depth, place.depth + min(num_stored, wanted))
        lead = self._tree.lead(chain, place.depth)
        slots = self._pool.take(num_stored * self._tree.columns).reshape(num_stored, self._tree.columns)
        if wanted:
            width = len(data) // wanted
            del hashes[num_stored:]
            stop = place.depth + num_stored
            next_hash = chain[stop] if stop < len(chain) else None
            end, data = Place(node, place.depth), data[: num_stored * width]
            node = self._ranking.append(end, hashes, data, slots, next_hash, admission)
        bag = self._begin_bag(node, stop, num_bag) if self._tree.has_checkpoints else None
        plan = self._stores.begin(place.depth, hashes, slots, lead, bag, told)
        if self._ranking.loose:
            self._room.trim_loose()
        return plan

    def _lacks_bag(self, place: Place, wanted: int) -> bool:
        """Whether there is none, complete or filling, so many positions behind ``place``."""
        node, depth = place
        return wanted > 0 or (depth > 0 and (node.bags is None or node.bags.at(depth) is None))

    def _begin_bag(self, node: Node, depth: int, num_slots: int | None) -> Slots | None:
        """Slots of a bag that is on its way, None without one: then more is to come."""
        if num_slots is None:
            self._tree.checkpoints.open(node)
            return None
        bag = self._pool.take(num_slots)
        self._ranking.begin_bag(node, depth, bag)
        return bag


def check_full(num_full: int, chain: Sequence[bytes]) -> None:
    """Raises ChainError unless ``chain`` has prefix hashes of so many full blocks."""
    if not 0 <= num_full <= len(chain):
        raise ChainError(f"{num_full} full blocks do not fit {len(chain)} prefix hashes")
