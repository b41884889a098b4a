"""The allocator as the rest of the project sees it."""

from collections.abc import Hashable, Sequence
from typing import Any

from allocator.conservation import check_pins, check_slots
from allocator.errors import ChainError, StalePlanError
from allocator.events import EventLog
from allocator.giving_back import give_back
from allocator.node import NO_PINS, Node, Pin, Place
from allocator.plans import Evicted, Hit, Stored, StorePlan, UncachedRun
from allocator.prefix_tree import PrefixTree
from allocator.ranking import Ranking
from allocator.slot_pool import SlotPool, SlotState, flat
from allocator.store_plans import StorePlans
from allocator.uncached import UncachedBlocks
from evictor import Admission, EvictionPolicy, KeepHints, LruPolicy, Newcomer

_SLACK = 1024

_STEP_WORK = 1 << 15
"""How much of what was cut off is taken away in one step; see ``Ranking.take_away``."""


class CpuOffloadingBlockAllocator:
    """Decides what the CPU pool holds: which chain positions, in which slots, and which of them leave.

    The life of a position::

        uncached --plan_store()--> filling --commit()--> resident --evict()--> gone
                                      |                    |
                                      +--abort()--> gone   +--pin()/unpin() around each load

    A position is resident only if every earlier one of its chain is. It moves no bytes and reads no
    clock; every method is a function of its arguments and the calls before. Not thread-safe.
    """

    def __init__(
        self,
        capacity: int,
        *,
        columns: int = 1,
        policy: EvictionPolicy[Any] | None = None,
        record_events: bool = False,
    ) -> None:
        """Make an empty pool.

        Args:
            capacity: slots in the pool.
            columns: slots per chain position; one for models with a single cache group.
            policy: ranks leaves; LRU by default. It must be fresh and is the allocator's alone. Hints of
                requests are heeded by a ``HintedPolicy``.
            record_events: keep ``Stored`` and ``Evicted`` events for ``take_events``.

        Raises:
            CapacityError: a capacity below 1.
        """
        self._pool = SlotPool(capacity)
        self._tree = PrefixTree(columns)
        self._policy: EvictionPolicy[Node] = LruPolicy() if policy is None else policy
        self._log = EventLog(record_events)
        self._ranking = Ranking(self._tree, self._policy, self._log)
        self._uncached = UncachedBlocks()
        self._pins: set[Pin] = set()
        self._stores = StorePlans(self._tree, self._ranking, self._pool)
        self._slack = capacity // columns // _SLACK
        self._step_work = self._work_left = _STEP_WORK
        self.num_evicted = 0
        """Positions evicted for new ones, ever."""

    @property
    def capacity(self) -> int:
        """Slots in the pool."""
        return self._pool.capacity

    @property
    def columns(self) -> int:
        """Slots per chain position."""
        return self._tree.columns

    @property
    def num_free(self) -> int:
        """Slots that are free."""
        self._stores.orphan()
        return self._pool.num_free

    @property
    def num_resident(self) -> int:
        """Slots that can serve a hit, and those that a cut has yet to give back."""
        return self._pool.num_in(SlotState.RESIDENT)

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

    def known_depth(self, chain: Sequence[bytes], stop: int) -> int:
        """How many of the first ``stop`` positions of ``chain`` are resident or filling. O(log n)."""
        return self._tree.find(chain, stop).depth

    def touch(self, chain: Sequence[bytes], hints: KeepHints | None = None) -> None:
        """A request asks for ``chain``: tell the policy, once per request.

        O(log n) to find it, then O(log n) at most for each of its segments.
        """
        self._ranking.use(chain, hints)

    def pin(self, chain: Sequence[bytes], start: int, stop: int) -> Pin:
        """Promise the slots of resident positions ``start <= p < stop`` to a load.

        Until ``unpin`` neither they nor anything before them is evicted or reused. O(log n), O(segments),
        plus copying the slots, which the pin carries as ``int64[stop - start, columns]``.

        Raises:
            ChainError: not all of these positions are resident, or there are none.
        """
        place = self._resident_part(chain, stop)
        if place.depth != stop or not 0 <= start < stop:
            raise ChainError(
                f"cannot pin positions {start} to {stop}: {place.depth} are resident; look the chain up first"
            )
        node = self._ranking.node_ending_at(place)
        pin = Pin(node, self._tree.slots_of(place, start))
        self._pins.add(pin)
        self._policy.leave(node)
        return pin

    def unpin(self, pin: Pin) -> None:
        """End a pin's promise. Slots whose positions left the tree meanwhile become free.

        O(log n), plus O(1) array work per slot that becomes free.

        Raises:
            StalePlanError: the pin was ended before.
        """
        if pin not in self._pins:
            raise StalePlanError("this pin was ended before, or belongs to another allocator")
        self._pins.remove(pin)
        if pin.node is not None:
            pin.node.pins = pin.node.pins - {pin} or NO_PINS
            self._ranking.refresh(pin.node)
        if pin.kept < len(pin.slots):
            self._pool.end_read(flat(pin.slots[pin.kept :]))

    def note_full(self, owner: Hashable, chain: Sequence[bytes], num_full: int) -> None:
        """``owner`` holds full GPU blocks for the first ``num_full`` positions of ``chain``.

        Raises:
            ChainError: more full blocks than hashes.
        """
        _check_full(num_full, chain)
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
        self, chain: Sequence[bytes], stop: int, limit: int | None = None, hints: KeepHints | None = None
    ) -> StorePlan | None:
        """Give slots to the unknown ones of the first ``stop`` positions of ``chain``.

        Evicts others where that pays, for one stretch of equal past after the other.

        Args:
            chain: prefix hashes.
            stop: how many of its positions are full blocks.
            limit: store at most that many.
            hints: how to keep all of the chain.

        Returns:
            What to copy where: a run that begins at the first unknown position. It is shorter than asked for
            where the pool has nothing worth less to evict. None if nothing is stored. End it with ``commit``
            or ``abort``. O(log n) plus O(1) array work per position stored and evicted.

        Raises:
            ChainError: more full blocks than hashes.
        """
        _check_full(stop, chain)
        self._stores.orphan()
        place = self._tree.find(chain, stop)
        wanted = min(stop - place.depth, stop if limit is None else limit)
        if wanted <= 0 or not (self.num_free or self._tree.has_dead or self._policy.choose() is not None):
            return None
        node = self._ranking.node_ending_at(place)
        self._policy.leave(node)
        admission = self._ranking.heed(node, hints, wanted)
        hashes = list(chain[place.depth : place.depth + wanted])
        data = self._tree.packed(hashes)
        num_stored = self._admit(node, hashes, admission)
        if not num_stored:
            self._ranking.refresh(node)
            return None
        width = len(data) // len(hashes)
        del hashes[num_stored:]
        slots = self._pool.take(num_stored * self.columns).reshape(num_stored, self.columns)
        stop = place.depth + num_stored
        next_hash = chain[stop] if stop < len(chain) else None
        end, data = Place(node, place.depth), data[: num_stored * width]
        self._ranking.append(end, hashes, data, slots, next_hash, admission)
        lead = self._tree.lead(chain, place.depth)
        return self._stores.begin(place.depth, hashes, slots, lead)

    def commit(self, plan: StorePlan) -> bool:
        """The bytes of ``plan`` are complete. They serve hits as soon as all earlier ones do.

        Returns False if they never will: the positions of ``plan`` have left the pool.

        Raises:
            StalePlanError: the plan was ended before.
        """
        settled = self._stores.commit(plan)
        for each in settled or ():
            self._log.record(Stored(each.hashes, each.parent_hash))
        return settled is not None

    def abort(self, plan: StorePlan) -> None:
        """The bytes of ``plan`` will not come: its positions and all after them leave the pool.

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
        if node is not None:
            self._cut(Place(node, plan.start))

    def evict(self, num_slots: int) -> int:
        """Evict until ``num_slots`` more are free or nothing is evictable; return how many became free.

        They may be a few more: 1/1024 of the pool at most, and what fills a position.
        """
        before = self.num_free
        self._make_room(before + num_slots, None, self._policy)
        return self.num_free - before

    def drop(self, chain: Sequence[bytes], position: int) -> None:
        """The slot of that position holds wrong bytes: it and everything after it leave the pool.

        Nothing happens unless it is resident: what is filling has no bytes yet that could be wrong. O(log n),
        and as much work on what it cuts off as ``tidy`` does, all calls of a step together.
        """
        node = self._tree.node_at(chain, 0, position)
        if node is not None and node.start + node.resident > position:
            self._cut(Place(node, position))

    def forget(self, first_hash: bytes) -> None:
        """All chains that begin so leave the pool, also what is on its way into it.

        Slots in use by jobs become free when those end.
        """
        node = self._tree.node_at([first_hash], 0, 0)
        if node is not None:
            self._cut(Place(node, 0))

    def reset(self) -> None:
        """Forget everything. Slots in use by jobs become free when those end."""
        self._cut(Place(self._tree.root, 0))
        self._uncached.clear()

    def tidy(self) -> bool:
        """A step of the engine ends: go on giving back the slots of what was cut off.

        A drop or a reset ends at once what it cuts off: nobody finds it. Giving the slots back may take
        longer, for there may be a million. One step does no more than so much of it. The rest is carried
        over, or done as soon as a store needs the slots. How many drops and ends of pins there are in a step
        is the caller's to bound. Returns whether slots may have been given back.
        """
        self._stores.orphan()
        self._ranking.join_more()
        had_dead = self._tree.has_dead
        self._work_left = self._take_away(self._step_work)
        return had_dead

    def take_events(self) -> list[Stored | Evicted]:
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
        for part in (self._tree, self._uncached, self._stores):
            part.check_invariants()
        self._policy.check_invariants([*self._tree.nodes(), *self._tree.dead_nodes()])
        check_pins(self._pins, self._tree, self._pool)
        self._pool.check_invariants()
        self._log.check_invariants(self._tree.num_cuts)
        check_slots(self._tree, self._pool, self._stores.plans)
        candidate = self._policy.choose()
        assert candidate is None or candidate.is_evictable, f"policy offers {candidate!r}"

    # Private

    def _resident_part(self, chain: Sequence[bytes], stop: int) -> Place:
        return self._tree.resident_part(self._tree.find(chain, stop))

    def _admit(self, parent: Node, hashes: Sequence[bytes], admission: Admission[Node]) -> int:
        """Evict for ``hashes`` below ``parent`` as far as that pays; return how many then fit."""
        for start, stop in self._ranking.stretches(hashes):
            num_slots = stop * self._tree.columns
            if self._pool.num_free < num_slots:
                self._make_room(num_slots, Newcomer(parent, hashes[start], stop - start), admission)
                if self._pool.num_free < num_slots:
                    return self._pool.num_free // self._tree.columns
        return len(hashes)

    def _make_room(self, num_slots: int, newcomer: Newcomer[Node] | None, admission: Admission[Node]) -> None:
        """Evict from the tails of leaves until ``num_slots`` are free or the policy would rather not.

        The last of them may lose a little more than that, 1/``_SLACK`` of the pool. A bite costs the same
        whatever its size, and the leaf that loses its tail is likely to be next, too.
        """
        while (shortage := num_slots - self._pool.num_free) > 0:
            if self._tree.has_dead:
                growing = None if newcomer is None else newcomer.parent
                self._take_away(-(-shortage // self._tree.columns), growing)
                continue
            most = -(-shortage // self._tree.columns) + self._slack
            removed = self._ranking.evict(most, newcomer, admission)
            if removed is None:
                return
            self.num_evicted += len(removed.slots)
            self._pool.move(flat(removed.slots), SlotState.RESIDENT, SlotState.FREE)
            self._log.record(Evicted(removed.hashes))

    def _cut(self, place: Place) -> None:
        """Everything after ``place`` is unknown from now on, and goes as soon as there is time for that."""
        self._ranking.cut(place)
        self._stores.note_cut()
        self._work_left = self._take_away(self._work_left)

    def _take_away(self, work: int, growing: Node | None = None) -> int:
        """Give back slots of what was cut off; return how much of ``work`` is left."""
        removed, work = self._ranking.take_away(work, growing)
        give_back(self._pool, removed)
        return work


def _check_full(num_full: int, chain: Sequence[bytes]) -> None:
    if not 0 <= num_full <= len(chain):
        raise ChainError(f"{num_full} full blocks do not fit {len(chain)} prefix hashes")
