"""The allocator as the rest of the project sees it."""

from collections.abc import Hashable, Sequence
from typing import Any

from allocator.adopting import Adopting
from allocator.bags import BagState
from allocator.conservation import check_conserved
from allocator.departures import Cause
from allocator.errors import ChainError
from allocator.events import EventLog
from allocator.hollow import Hollow
from allocator.leases import Leases
from allocator.node import Node, Pin, Place
from allocator.pins import Pins
from allocator.planning import Planning, check_full
from allocator.plans import Event, Hit, Note, StorePlan, UncachedRun
from allocator.prefix_tree import PrefixTree
from allocator.ranking import Ranking
from allocator.resizing import Resizing
from allocator.room import Room
from allocator.shedding import Shedding
from allocator.slot_pool import SlotPool, SlotQueue, Slots, SlotState, check_sizes
from allocator.store_plans import StorePlans
from allocator.uncached import UncachedBlocks
from evictor import EvictionPolicy, KeepHints, LruPolicy

_STEP_WORK = 1 << 15  # of what was cut off, in one step; see ``Ranking.take_away``


class CpuOffloadingBlockAllocator:
    """Decides what the CPU pool holds: which chain positions, in which slots, and which of them leave.

    The life of a position::

        uncached --plan_store()--> filling --commit()--> resident --evict()--> gone
                                      |                    |
                                      +--abort()--> gone   +--pin()/unpin() around each load

    A position is resident only if every earlier one of its chain is, with a slot or ``hollow``. Models with
    windows or states can go on at *checkpoints* only: depths of a chain with a *bag* of slots. It moves no
    bytes and reads no clock: a method is a function of its arguments and the calls before. Not thread-safe.
    """

    def __init__(
        self,
        capacity: int,
        *,
        columns: int = 1,
        bag_slots: int = 0,
        policy: EvictionPolicy[Any] | None = None,
        record_events: bool = False,
        bag_reach: int = 1,
        admits_all: bool = False,
        order: Slots | None = None,
    ) -> None:
        """Make an empty pool.

        Args:
            capacity: slots in the pool.
            columns: slots per chain position; none for models without full attention.
            bag_slots: most slots that a bag has; none for models without windows or states.
            policy: ranks leaves; LRU by default. It must be fresh and is the allocator's alone. Hints of
                requests are heeded by a ``HintedPolicy``.
            record_events: keep events of positions and bags for ``take_events``.
            bag_reach: positions before a checkpoint whose hashes ``BagStored`` has.
            admits_all: evict for whatever is to be stored, even if the policy thinks it worth less.
            order: of slots as they are handed out at first, for a ``SlotQueue``; None: ascending.

        Raises:
            CapacityError: a capacity too small for a position and a bag, or neither columns nor bags.
        """
        check_sizes(capacity, columns, bag_slots)
        self._pool = SlotPool(capacity) if order is None else SlotQueue(capacity, order)
        self._bag_slots = bag_slots
        self._tree = PrefixTree(columns, has_checkpoints=bag_slots > 0)
        self._policy: EvictionPolicy[Node] = LruPolicy() if policy is None else policy
        self._log = EventLog(record_events, self._tree, bag_reach)
        self._ranking = Ranking(self._tree, self._policy, self._log)
        self._uncached = UncachedBlocks()
        self._stores = StorePlans(self._tree, self._ranking, self._pool, self._log)
        self._room = Room(self._tree, self._ranking, self._pool, self._policy, self._log, admits_all)
        self.departures = self._room.departures
        parts = self._tree, self._ranking, self._pool, self._policy
        self._pins = Pins(*parts, self._room)
        kept = self._room, self._stores
        self._planning = Planning(*parts, *kept)
        self.adopting = Adopting(*parts, self._log)
        self.hollow = Hollow(*parts, *kept, self._planning, self._pins, self._log, self._cut)
        self.resizing = Resizing(*parts, self._room, self._cut, self.hollow.empty_node)
        self.leases = Leases(self._tree, self._ranking, self._policy, self._room)
        self.shedding = Shedding(self._tree, self._policy, self._room)
        self._step_work = self._work_left = _STEP_WORK

    @property
    def capacity(self) -> int:
        """Slots in the pool, without those that are closed; see ``resizing``."""
        return self._pool.num_open

    @property
    def num_slots(self) -> int:
        """Slots that it has at most."""
        return self._pool.capacity

    @property
    def columns(self) -> int:
        """Slots per chain position."""
        return self._tree.columns

    @property
    def num_evicted(self) -> int:
        """Positions evicted for new ones, ever."""
        return self._room.num_evicted

    @property
    def num_thinned(self) -> int:
        """Bags evicted for new ones, ever, of checkpoints that others went on behind."""
        return self._room.num_thinned

    @property
    def num_free(self) -> int:
        """Slots that are free."""
        self._stores.orphan()
        return self._pool.num_free

    @property
    def num_resident(self) -> int:
        """Slots of positions that can serve a hit, and those that a cut has yet to give back."""
        return self._pool.num_in(SlotState.RESIDENT)

    @property
    def num_bagged(self) -> int:
        """Slots of complete bags, and those that a cut has yet to give back."""
        return self._pool.num_in(SlotState.BAGGED)

    @property
    def num_filling(self) -> int:
        """Slots of stores in flight, of those no longer wanted too."""
        self._stores.orphan()
        return self._pool.num_in(SlotState.FILLING)

    @property
    def num_leaving(self) -> int:
        """Slots that become free when the loads reading them end."""
        return self._pool.num_in(SlotState.LEAVING)

    @property
    def num_pins(self) -> int:
        """Pins that have not ended."""
        return len(self._pins)

    def lookup(self, chain: Sequence[bytes]) -> Hit:
        """The resident part of ``chain``. Mutates nothing. O(log n), O(segments), copies ``depth`` slots."""
        place = self._resident_part(chain, len(chain))
        slots = self._tree.slots_of(place, 0)
        slots.flags.writeable = False
        return Hit(place.depth, slots)

    def resident_depth(self, chain: Sequence[bytes]) -> int:
        """``lookup(chain).depth`` without the slots. O(log n)."""
        return self._resident_part(chain, len(chain)).depth

    def usable_depth(self, chain: Sequence[bytes], limit: int, beyond: int = 0) -> int:
        """The deepest place up to ``limit``, and behind ``beyond``, where a request for ``chain`` can go on.

        With windows or states that is the last checkpoint there, without any the last resident position. 0 if
        there is none. O(log n), with checkpoints and O(segments).
        """
        if self._tree.has_checkpoints:
            checkpoint = self._tree.last_checkpoint(self._tree.find(chain, limit), beyond)
            return 0 if checkpoint is None else checkpoint.depth
        depth = self._resident_part(chain, limit, beyond).depth
        return depth if depth > beyond else 0

    def known_depth(self, chain: Sequence[bytes], stop: int) -> int:
        """How many of the first ``stop`` positions of ``chain`` are resident or filling. O(log n)."""
        return self._tree.find(chain, stop).depth

    def touch(self, chain: Sequence[bytes], hints: KeepHints | None = None) -> int:
        """A request asks for ``chain``, once. O(log n), and per segment. Returns a number for ``ended``."""
        self._ranking.use(chain, hints)
        self._room.trim_loose()
        return self._policy.turn

    def ended(self, chain: Sequence[bytes], turn: int, ending: int) -> None:
        """The answer to request ``turn``, which made ``chain`` longer, has ended so. Costs as ``touch``."""
        self._ranking.ended(chain, turn, ending)

    def pin(self, chain: Sequence[bytes], start: int, stop: int) -> Pin:
        """Promise the slots of resident positions ``start <= p < stop`` to a load.

        Until ``unpin`` neither they nor anything before them is evicted or reused. O(log n), O(segments),
        plus copying the slots, which the pin carries as ``int64[stop - start, columns]``. With windows or
        states there has to be a checkpoint at ``stop``. Its bag is promised, too.

        Raises:
            ChainError: not all of these positions are resident, or there are none, or no checkpoint.
        """
        return self._pins.make(chain, start, stop)

    def unpin(self, pin: Pin) -> None:
        """End a pin's promise, and free slots whose positions left the tree. O(log n), and O(1) a slot.

        Raises:
            StalePlanError: the pin was ended before.
        """
        self._pins.end(pin)

    def note_full(self, owner: Hashable, chain: Sequence[bytes], num_full: int) -> None:
        """``owner`` holds full GPU blocks for the first ``num_full`` positions of ``chain``.

        Raises:
            ChainError: more full blocks than hashes.
        """
        check_full(num_full, chain)
        self._uncached.note(owner, chain, num_full)

    def forget_owner(self, owner: Hashable) -> None:
        """``owner`` no longer holds its GPU blocks."""
        self._uncached.forget(owner)

    @property
    def num_owners(self) -> int:
        """Who may hold uncached blocks."""
        return len(self._uncached)

    def uncached(self) -> list[UncachedRun]:
        """Blocks without a copy below, by owner, deepest shared prefix first."""
        return self._uncached.runs(self._tree)

    def plan_store(
        self,
        chain: Sequence[bytes],
        stop: int,
        limit: int | None = None,
        hints: KeepHints | None = None,
        num_bag: int | None = None,
        must: bool = False,
        note: Note | None = None,
    ) -> StorePlan | None:
        """Give slots to the unknown ones of the first ``stop`` positions of ``chain``, and to a bag.

        Evicts others where that pays, for one stretch of equal past after the other.

        Args:
            chain: prefix hashes.
            stop: how many of its positions are full blocks.
            limit: store at most that many.
            hints: how to keep all of the chain.
            num_bag: slots of the bag of a checkpoint at ``stop``, where it needs one; perhaps 0.
            must: evict whatever may be evicted, also what is worth more.
            note: makes the note of the ``StorePlan``; None: it has none.

        Returns:
            What to copy where: a run that begins at the first unknown position. It is shorter than asked for
            where the pool has nothing worth less to evict. With windows or states it is all or nothing, and
            has a bag if it reaches ``stop``. None if nothing is stored. End it with ``commit`` or ``abort``.
            O(log n) plus O(1) array work per position stored and evicted.

        Raises:
            ChainError: more full blocks than hashes, or more slots than a bag has.
        """
        check_full(stop, chain)
        if num_bag is not None and not 0 <= num_bag <= self._bag_slots:
            raise ChainError(f"a bag of {num_bag} slots: one has at most {self._bag_slots}")
        self._stores.orphan()
        return self._planning.plan(chain, stop, limit, hints, num_bag, must, note)

    def close(self, chain: Sequence[bytes]) -> None:
        """That request stores no more: what nobody else has behind its last checkpoint leaves. O(log n)."""
        node, depth = self._tree.find(chain, len(chain))
        if depth == node.end and node.bags is not None and node.bags.is_open:
            self._tree.checkpoints.close(node)
            self._ranking.refresh(node)
            self._room.trim_loose()

    def commit(self, plan: StorePlan) -> bool:
        """The bytes of ``plan`` are complete. They serve hits as soon as all earlier ones do.

        Returns False if they never will: the positions of ``plan`` have left the pool.

        Raises:
            StalePlanError: the plan was ended before.
        """
        settled = self._stores.commit(plan)
        if self._ranking.loose:
            self._room.trim_loose()
        return settled is not None

    def abort(self, plan: StorePlan) -> None:
        """The bytes of ``plan`` will not come: its positions, and all after them, or its bag alone, leave.

        Raises:
            StalePlanError: the plan was ended before.
        """
        self.abandon(plan)
        self._stores.end_orphan(plan)

    def abandon(self, plan: StorePlan) -> None:
        """As ``abort``, but its slots may still be written: they are kept until the plan is ended.

        Raises:
            StalePlanError: the plan was ended before.
        """
        node = self._stores.abandon(plan)
        if node is not None and plan.hashes:
            self._cut(Place(node, plan.start))
        elif node is not None:
            self._room.remove_bag(node, plan.stop, BagState.FILLING)

    def coldest(self, num_slots: int, most: int) -> list[bytes]:
        """Last hashes of leaves that would go next, in order: ``most``, or those that have so many slots.

        Of leaves that are worth the same, others may go first afterwards. O(log n) for each.
        """
        return [leaf.hash_at(len(leaf) - 1) for leaf in self._ranking.coldest(num_slots, most)]

    def evict(self, num_slots: int) -> int:
        """Evict until ``num_slots`` more are free or nothing is evictable; return how many became free.

        They may be more: 1/1024 of the pool at most, and what fills a position, or goes back to a checkpoint.
        """
        return self._room.evict(num_slots)

    def drop(self, chain: Sequence[bytes], position: int) -> None:
        """The slot of that position holds wrong bytes: it and everything after it leave the pool.

        Nothing happens unless it is resident: what is filling has no bytes yet that could be wrong. O(log n),
        and as much work on what it cuts off as ``tidy`` does, all calls of a step together.
        """
        node = self._tree.node_at(chain, 0, position)
        if node is not None and node.start + node.resident > position:
            self.departures.note(chain[position], Cause.DROPPED)
            self._cut(Place(node, position))

    def drop_bag(self, chain: Sequence[bytes], depth: int) -> None:
        """The bag of the checkpoint at ``depth`` holds wrong bytes: it leaves the pool alone.

        Nothing happens unless it is complete. O(log n).
        """
        if depth > 0 and (node := self._tree.node_at(chain, 0, depth - 1)) is not None:
            self._room.remove_bag(node, depth, BagState.COMPLETE)

    def forget(self, first_hash: bytes) -> None:
        """All chains that begin so leave the pool, also what is on its way there. Like ``reset``."""
        if (node := self._tree.node_at([first_hash], 0, 0)) is not None:
            self.departures.note(first_hash, Cause.DROPPED)
            self._cut(Place(node, 0))

    def reset(self) -> None:
        """Forget everything. Slots in use by jobs become free when those end."""
        self._cut(Place(self._tree.root, 0))
        self._uncached.clear()

    def tidy(self) -> bool:
        """A step of the engine ends: go on giving back the slots of what was cut off.

        Nobody finds it since, but giving back the slots, perhaps a million, may take longer: one step does a
        part of it, or a store as soon as it needs them. How many drops and ends of pins there are in a step
        is the caller's to bound. Returns whether there was any.
        """
        self._stores.orphan()
        self._ranking.join_more()
        had_dead = self._tree.has_dead
        self._work_left = self._room.take_away(self._step_work)
        return had_dead

    def take_events(self) -> list[Event]:
        """Events since the last call, oldest first.

        What a cut takes away is listed as its slots are given back, and what came after it comes after that.
        """
        return self._log.take()

    @property
    def is_listing(self) -> bool:
        """Whether there are events to come once ``tidy`` has gone on."""
        return self._log.is_listing

    def check_invariants(self) -> None:
        """Tree, pool, policy, pins and plans agree. O(pool); for tests."""
        self._stores.orphan()
        own = (self._pool, self._tree, self._uncached, self._stores, self._pins)
        for part in (*own, self.leases, self.hollow, self.departures, self.resizing):
            part.check_invariants()
        self._policy.check_invariants([*self._tree.nodes(), *self._tree.dead_nodes()])
        self._log.check_invariants(self._tree.num_cuts)
        check_conserved(self._tree, self._pool, self._stores.plans)
        assert (leaf := self._policy.choose()) is None or leaf.is_evictable, f"policy offers {leaf!r}"

    # Private

    def _resident_part(self, chain: Sequence[bytes], stop: int, beyond: int = 0) -> Place:
        return self._tree.slotted_part(self._tree.find(chain, stop), beyond)

    def _cut(self, place: Place) -> None:
        """Everything after ``place`` is unknown from now on, and goes as soon as there is time for that."""
        self._ranking.cut(place)
        self._stores.note_cut()
        self._work_left = self._room.take_away(self._work_left)
