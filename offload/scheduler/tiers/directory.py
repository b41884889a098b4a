"""What a tier has, as far as one engine knows that alone: extents by name, in places."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from allocator import CpuOffloadingBlockAllocator, Event, Note, Pin, StorePlan
from evictor import make_policy
from offload.messages import EPOCH_SHIFT, NAMED, PRIVATE, Extents, Ids, Names, TierFacts, is_private
from offload.naming import ROOT, as_bytes, bag_names, rows
from offload.scheduler.tiers.named_places import NamedPlaces, as_row
from offload.scheduler.tiers.names import Path, name_of, names_of
from offload.scheduler.tiers.recovery import Agreed, agree, chains
from offload.scheduler.tiers.told import ExtentsNote


class Reading(NamedTuple):
    """Extents that are being read, and stay where they are until that ends."""

    life: CpuOffloadingBlockAllocator
    pin: Pin
    places: Ids
    generations: Ids

    @property
    def place(self) -> str:
        return ""

    def extents(self, starts: Ids, skips: Ids) -> Extents:
        """What workers must know of it: see ``Contents``."""
        return Extents(self.places, self.generations, starts, skips)


class Writing(NamedTuple):
    """Extents that are being written, in places that are theirs."""

    life: CpuOffloadingBlockAllocator
    plan: StorePlan
    places: Ids

    @property
    def start(self) -> int:
        """The first extent of its chain that is written."""
        return self.plan.start

    @property
    def stop(self) -> int:
        """Behind the last."""
        return self.plan.stop


class Directory:
    """Extents in chain order, kept prefix-closed, and evicted from the ends of chains as a policy says.

    It is an allocator whose positions are extents and whose slots are places. After a reset it begins anew
    with the places that hold nothing: what was kept before stays there for a later life of the engine until
    its places are needed. What is written from then on is private, unless weights are given a name. Then
    what was written under that name is there again.
    """

    def __init__(
        self,
        facts: Sequence[TierFacts],
        *,
        policy: str,
        clock: Callable[[], float],
        has_bags: bool = False,
        is_hollow: bool = False,
        admits_all: bool = False,
        record_events: bool = False,
        path_from: Callable[[Sequence[bytes], Sequence[int]], Path] | None = None,
    ) -> None:
        """Know again what all ranks have kept.

        Args:
            facts: of every rank.
            policy: name of the eviction policy.
            clock: in seconds.
            has_bags: some extents are of bags.
            is_hollow: all are.
            record_events: list extents that enter and leave, for ``take_events``.
            admits_all: whatever is to be written is; else what the policy thinks worth less stays out.
            path_from: makes paths of names and slots of extents, for events to tell of; None: none do.
        """
        self._has_bags = has_bags
        self._is_hollow = is_hollow
        self.num_places = min(fact.num_places for fact in facts)
        self.epoch = max(fact.epoch for fact in facts)
        self._suffix = b""
        self._policy = policy
        self._clock = clock
        self._admits_all = admits_all
        self._record_events = record_events
        self._path_from = path_from
        self._lives_before: list[
            CpuOffloadingBlockAllocator
        ] = []  # whose extents are yet to be listed as gone
        self._generations: Ids = np.zeros(self.num_places, dtype=np.int64)
        self._num_slots: Ids = np.zeros(self.num_places, dtype=np.int64)  # where events are to tell that
        self._is_kept = np.zeros(self.num_places, dtype=np.bool_)  # somebody may ask for what lies there
        self._named = NamedPlaces(self.num_places)
        self.num_orphans = self.num_written_before = 0
        """Extents that were kept, and lead to nothing; those that were written in the last life before."""
        self._recover(facts)

    @property
    def is_private(self) -> bool:
        """Whether a reset has been, and weights have no name: what is written is of this life only."""
        return is_private(self._suffix)

    @property
    def num_used(self) -> int:
        """Places that hold something, or are about to."""
        return self.num_places - self._allocator.num_free

    @property
    def num_evicted(self) -> int:
        """Extents evicted for new ones since the last reset."""
        return self._allocator.num_evicted

    @property
    def has_room(self) -> bool:
        """Whether a place is free."""
        return self._allocator.num_free > 0

    def find(self, request_id: str, names: Sequence[bytes]) -> int:
        """How many leading extents it has, for that request. O(log n), and O(segments)."""
        return self.depth(names)

    def find_checkpoint(
        self, request_id: str, chain: Sequence[bytes], limit: int, path_to: Callable[[int], Path]
    ) -> int:
        """The deepest checkpoint within the first ``limit`` positions, for that request; 0: none."""
        depth = self.deepest(chain, limit)
        if not depth:
            return 0
        names = path_to(depth).names
        if self.depth(names) < len(names):
            self.forget_end(chain[depth - 1])
            return 0
        return depth

    def answered(self) -> list[str]:
        """Everything is known at once."""
        return []

    def depth(self, names: Sequence[bytes]) -> int:
        """How many leading extents it has. O(log n)."""
        return self._allocator.resident_depth(names)

    def known_depth(self, names: Sequence[bytes]) -> int:
        """The same, with those that are being written. O(log n)."""
        return self._allocator.known_depth(names, len(names))

    def touch(self, names: Sequence[bytes]) -> None:
        """A request asks for these."""
        self._allocator.touch(names)
        self._is_untidy = True

    def read(self, names: Sequence[bytes], start: int, stop: int) -> Reading:
        """Begin to read these extents of a chain, which it has."""
        pin = self._allocator.pin(names, start, stop)
        places = self._place_of[pin.slots[:, 0]]
        return Reading(self._allocator, pin, places, self._generations[places])

    def end_read(self, reading: Reading) -> None:
        """They may be evicted again."""
        reading.life.unpin(reading.pin)

    def write(
        self, names: Sequence[bytes], stop: int, limit: int, note: Note | None = None
    ) -> Writing | None:
        """Give places to the unknown ones of the first ``stop`` extents, ``limit`` at most; None: to none."""
        plan = self._allocator.plan_store(names, stop, limit, note=note)
        if plan is None:
            return None
        return Writing(self._allocator, plan, self._place_of[plan.slots[:, 0]])

    def extents(self, writing: Writing, job_id: int, starts: Ids) -> Extents:
        """What workers must know of it: ``starts`` as in ``Extents``."""
        plan, num_extents = writing.plan, len(writing.places)
        number = job_id % (1 << EPOCH_SHIFT) + 1  # the pool may have put an epoch of its own in front
        generations = np.full(num_extents, self.epoch << EPOCH_SHIFT | number, dtype=np.int64)
        self._generations[writing.places] = generations
        self._num_slots[writing.places] = np.diff(starts)
        self._is_kept[writing.places] = True
        self._named.forget(writing.places)
        names = rows(plan.hashes)
        parents = rows([plan.parent_hash or ROOT, *plan.hashes[:-1]])
        skips = np.zeros(num_extents, dtype=np.int64)
        return Extents(writing.places, generations, starts, skips, names, parents, suffix=self._suffix)

    def end_write(self, writing: Writing, *, is_good: bool) -> None:
        """They are there, or never will be."""
        self._is_kept[writing.places] = is_good and not self.is_private
        if not is_good:
            writing.life.abort(writing.plan)
        elif writing.life.commit(writing.plan) and writing.life is self._allocator:
            self._note(writing)

    def drop(self, names: Sequence[bytes], index: int) -> int:
        """See ``Contents``."""
        num_behind = max(0, self.depth(names) - index - 1)
        self._allocator.drop(names, index)
        self._is_untidy = True
        return num_behind

    def reset(self) -> None:
        """It has nothing for this life. O(places), as array work."""
        self._suffix = PRIVATE
        self._retire()
        self._begin(self._oldest_first())

    def name_weights(self, suffix: bytes) -> None:
        """See ``Contents``. O(places), as array work, and O(extents) of that suffix."""
        assert self._suffix and suffix[:1] == NAMED, f"{self._suffix!r} before {suffix!r}"
        self._suffix = suffix
        self._retire()
        self._take_up(self._named.of(suffix, self._generations))

    def deepest(self, chain: Sequence[bytes], limit: int) -> int:
        """The deepest checkpoint within the first ``limit`` positions, 0 if there is none.

        O(limit), in C; once for each request. Whether all of it is still there is yet to be asked.
        """
        names = names_of(chain[:limit])
        names.reverse()
        found = next(filter(self._ends.__contains__, names), None)
        return 0 if found is None else len(names) - names.index(found)

    def forget_end(self, prefix_hash: bytes) -> None:
        """There is no checkpoint any more."""
        self._ends.pop(name_of(prefix_hash), None)

    def take_events(self) -> list[Event]:
        """Events since the last call, oldest first; after a reset a bounded part of what it took away."""
        events: list[Event] = []
        while self._lives_before:
            life = self._lives_before[0]
            life.tidy()
            events += life.take_events()
            if life.is_listing:
                return events
            del self._lives_before[0]
        return events + self._allocator.take_events()

    @property
    def is_listing(self) -> bool:
        """Whether there are events to come."""
        return bool(self._lives_before) or self._allocator.is_listing

    def tidy(self) -> None:
        """A step ends: what was dropped or used leaves something to do."""
        if self._is_untidy:
            self._is_untidy = self._allocator.tidy()

    def check_invariants(self) -> None:
        """Places are those of slots, each once."""
        self._allocator.check_invariants()
        self._named.check_invariants()
        order = np.sort(self._place_of)
        assert np.array_equal(order, np.arange(self.num_places)), "places are not those of slots"

    def _begin(self, place_of: Ids) -> None:
        self._place_of: Ids = place_of
        self._is_untidy = False
        self._ends: dict[bytes, None] = {}
        self._allocator: CpuOffloadingBlockAllocator = CpuOffloadingBlockAllocator(
            self.num_places,
            policy=make_policy(self._policy, self.num_places, self._clock),
            admits_all=self._admits_all,
            record_events=self._record_events,
        )

    def _retire(self) -> None:
        """What is there now is not for what comes."""
        if self._record_events:
            self._allocator.reset()
            self._lives_before.append(self._allocator)

    def _oldest_first(self) -> Ids:
        """All places: first those that nobody will ask for. Of each kind the oldest come first."""
        order: Ids = np.lexsort((self._generations, self._is_kept))
        return order

    def _note(self, writing: Writing) -> None:
        """Remember what has a suffix, and where bags begin."""
        plan = writing.plan
        parents = [plan.parent_hash or ROOT, *plan.hashes[:-1]]
        if self._suffix[:1] == NAMED:
            self._named.note(writing.places, rows(plan.hashes), rows(parents), as_row(self._suffix))
        self._note_ends(rows(plan.hashes), rows(parents))

    def _note_ends(self, names: Names, parents: Names) -> None:
        """Remember where bags begin among these extents, the latest of them."""
        if not self._has_bags:
            return
        ends = bag_names(names)
        is_end = (ends == parents).all(axis=1)
        if self._is_hollow:
            is_end |= ~parents.any(axis=1)
        for end in as_bytes(ends[is_end]):
            self._ends.pop(end, None)
            self._ends[end] = None
        while len(self._ends) > self.num_places:
            del self._ends[next(iter(self._ends))]

    def _recover(self, facts: Sequence[TierFacts]) -> None:
        agreed = agree(facts, self.num_places)
        self._generations[agreed.places] = agreed.generations
        for fact in facts:
            is_place = fact.places < self.num_places
            self._num_slots[fact.places[is_place]] = fact.num_slots[is_place]
        last = agreed.generations.max(initial=0) >> EPOCH_SHIFT
        if last == self.epoch - 1:
            self.num_written_before = int(np.count_nonzero(agreed.generations >> EPOCH_SHIFT == last))
        is_named = np.asarray(agreed.suffixes.any(axis=1))
        named = agreed.rows(is_named)
        if len(named.places):
            self._is_kept[named.places] = True
            self._named.note(named.places, named.names, named.parents, named.suffixes)
        plain = agreed.rows(~is_named)
        self._take_up(plain)
        self.num_orphans = len(plain.places) - self.num_used

    def _take_up(self, agreed: Agreed) -> None:
        """Begin anew with what was kept."""
        order = self._oldest_first()
        self._begin(order)
        kept = chains(agreed)
        if self._path_from is None or not self._record_events:
            for names in kept.names():
                self._allocator.adopting.adopt(names)
        else:
            num_slots = self._num_slots[kept.extents.places].tolist()
            sizes = dict(zip(as_bytes(kept.extents.names), num_slots, strict=True))
            for names in kept.names():
                path = self._path_from(names, [sizes[name] for name in names])
                self._allocator.adopting.adopt(names, ExtentsNote(path))
        self._note_ends(kept.extents.names, kept.extents.parents)
        taken = kept.extents.places  # a fresh allocator has handed out its slots in ascending order
        self._is_kept[taken] = True
        is_free = np.ones(self.num_places, dtype=np.bool_)
        is_free[taken] = False
        self._place_of = np.concatenate([taken, order[is_free[order]]])
