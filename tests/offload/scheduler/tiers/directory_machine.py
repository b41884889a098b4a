"""A directory beside a disk that does what media promise: what is read must be what was written."""

from dataclasses import dataclass, field
from typing import ClassVar, NamedTuple, TypeVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from offload.messages import EPOCH_SHIFT, PRIVATE, Extents
from offload.naming import ROOT
from offload.scheduler.tiers.directory import Directory, Reading, Writing
from offload.scheduler.tiers.names import Grid
from offload.scheduler.weights import suffix_of
from tests.offload.scheduler.tiers.facts import SLOTS, Told, facts, starts
from tests.strategies import chains

POSITIONS = 1
NUM_RANKS = 2
SELDOM = st.sampled_from([False, False, True])
T = TypeVar("T")


class Record(NamedTuple):
    """What a rank's log says of a place."""

    generation: int
    name: bytes
    parent: bytes
    suffix: bytes


@dataclass(eq=False)
class Write:
    """A job under way.

    Attributes:
        writing: of the directory.
        extents: what workers were told.
        records: by place.
        is_refused: a rank says no, as another job is at one of its places.
        is_cut: what it follows has left the directory.
        life: in which it began.
    """

    writing: Writing
    extents: Extents
    records: dict[int, Record]
    is_refused: bool
    is_cut: bool = False
    life: int = 0


@dataclass(eq=False)
class Read:
    """A job under way."""

    reading: Reading
    records: dict[int, Record]
    life: int = 0


@dataclass
class Disk:
    """What each rank has, by place, and the newest generation that was ever begun there."""

    kept: dict[int, Record] = field(default_factory=dict)
    newest: dict[int, int] = field(default_factory=dict)


class DirectoryMachine(RuleBasedStateMachine):
    """The model knows names that were committed and not cut. Of these, evictions may take any from the ends.

    Whatever the directory says it has must lie on every rank's disk under that name and generation, and stay
    there until the read has ended.
    """

    num_parts: ClassVar[int] = 1

    @initialize(num_places=st.sampled_from([1, 3, 8, 40]), policy=st.sampled_from(["lru", "hazard"]))
    def begin(self, num_places: int, policy: str) -> None:
        self.num_places, self.policy = num_places, policy
        self.disks = [Disk() for _ in range(NUM_RANKS)]
        self.epoch = self.job_id = self.life = 0
        self.now = 0.0
        self.start()

    def start(self) -> None:
        """A new engine over what the disks have."""
        self.epoch += 1
        self.life += 1
        self.suffix = b""
        self.is_unused = False
        self.in_flight: list[Write | Read] = []
        told = [
            facts(
                [
                    Told(place, record.generation, record.name, record.parent, suffix=record.suffix)
                    for place, record in disk.kept.items()
                    if record.suffix != PRIVATE
                ],
                num_places=self.num_places,
                epoch=self.epoch,
                part=rank % self.num_parts,
                num_parts=self.num_parts,
            )
            for rank, disk in enumerate(self.disks)
        ]
        self.directory = Directory(told, policy=self.policy, clock=lambda: self.now)
        self.noted = self.alike()  # under names, by place
        self.take_up(self.noted)

    # What the model thinks

    def ranks_of(self, place: int) -> list[Disk]:
        return [disk for rank, disk in enumerate(self.disks) if (place - rank) % self.num_parts == 0]

    def alike(self) -> dict[int, Record]:
        """What all ranks have alike, by place."""
        found = {}
        for place in range(self.num_places):
            first, *others = [disk.kept.get(place) for disk in self.ranks_of(place)]
            if first is not None and all(other == first for other in others):
                found[place] = first
        return found

    def take_up(self, records: dict[int, Record]) -> None:
        """Of these, those are known that have the suffix of this life, and all that they follow."""
        mine = [record for record in records.values() if record.suffix == self.suffix]
        self.parents = {record.name: record.parent for record in mine}
        self.committed = {name for name in self.parents if self.reaches_root(name)}

    def reaches_root(self, name: bytes) -> bool:
        while name in self.parents:
            name = self.parents[name]
        return name == ROOT

    def model_depth(self, names: list[bytes]) -> int:
        return next((at for at, name in enumerate(names) if name not in self.committed), len(names))

    def cut(self, gone: set[bytes]) -> None:
        """These and all that follows them are no longer known, nor ever will be what is on its way there."""
        size = 0
        while size < len(gone):
            size = len(gone)
            for write in self.under_way(Write):
                names = {record.name for record in write.records.values()}
                if write.life == self.life and names & gone:
                    write.is_cut = True
                    gone |= names
            gone |= {name for name, parent in self.parents.items() if parent in gone and self.is_known(name)}
        self.committed -= gone

    def is_known(self, name: bytes) -> bool:
        """Whether it was committed, or is on its way."""
        coming = (write for write in self.under_way(Write) if write.life == self.life and not write.is_cut)
        return name in self.committed or any(
            name == record.name for write in coming for record in write.records.values()
        )

    # What happens

    @rule(chain=chains(), limit=st.integers(1, 4))
    def write(self, chain: list[bytes], limit: int) -> None:
        self.start_write(chain, limit)

    def start_write(self, chain: list[bytes], limit: int) -> Write | None:
        names = Grid.of(POSITIONS, 1).names(chain)
        writing = self.directory.write(names, len(names), limit)
        if writing is None:
            return None
        self.job_id += 1
        extents = self.directory.extents(writing, self.job_id, starts(writing))
        places = extents.places.tolist()
        first = writing.plan.start
        assert 1 <= len(places) <= limit
        assert extents.starts.tolist() == [SLOTS * index for index in range(len(places) + 1)]
        assert not extents.skips.any() and extents.suffix == self.suffix
        assert extents.names is not None and extents.parents is not None
        told = [row.tobytes() for row in extents.names]
        assert told == names[first : first + len(places)]
        parents = [row.tobytes() for row in extents.parents]
        assert parents == [ROOT, *names][first : first + len(places)]
        assert set(extents.generations.tolist()) == {self.epoch << EPOCH_SHIFT | (self.job_id + 1)}
        records = {
            place: Record(generation, name, parent, extents.suffix)
            for place, generation, name, parent in zip(
                places, extents.generations.tolist(), told, parents, strict=True
            )
        }
        assert len(records) == len(places), "a place comes twice"
        self.is_unused = False
        for place in places:
            self.noted.pop(place, None)
        is_refused = False
        for other in self.in_flight:
            if other.records.keys() & records.keys():
                assert other.life < self.life, f"places {places} are those of another job"
                is_refused = True
        if not is_refused:
            for place, record in records.items():
                for disk in self.ranks_of(place):
                    assert record.generation > disk.newest.get(place, 0), f"place {place}: not newer"
                    disk.newest[place] = record.generation
                    disk.kept.pop(place, None)
        self.parents.update({record.name: record.parent for record in records.values()})
        write = Write(writing, extents, records, is_refused, life=self.life)
        self.in_flight.append(write)
        return write

    @rule(chain=chains(), limit=st.integers(1, 9), data=st.data())
    def put(self, chain: list[bytes], limit: int, data: st.DataObject) -> None:
        """A write that ends at once, and well unless another is at its places."""
        write = self.start_write(chain, limit)
        if write is not None:
            self.end(write, True, data)

    @precondition(lambda self: self.under_way(Write))
    @rule(is_good=st.sampled_from([True, True, False]), data=st.data())
    def end_write(self, is_good: bool, data: st.DataObject) -> None:
        self.end(data.draw(st.sampled_from(self.under_way(Write))), is_good, data)

    def under_way(self, kind: type[T]) -> list[T]:
        return [each for each in self.in_flight if isinstance(each, kind)]

    def end(self, write: Write, is_good: bool, data: st.DataObject) -> None:
        self.in_flight.remove(write)
        is_good = is_good and not write.is_refused
        self.land(write, is_good, data)
        self.directory.end_write(write.writing, is_good=is_good)
        if write.life != self.life:
            return
        names = {record.name for record in write.records.values()}
        if not is_good and not write.is_cut:
            self.cut(names)
        elif is_good and not write.is_cut:
            self.committed |= names
            self.noted.update(write.records)

    def land(self, write: Write, is_good: bool, data: st.DataObject) -> None:
        """Records of it are on the disks: all, or some."""
        if write.is_refused:
            return
        for place, record in write.records.items():
            for disk in self.ranks_of(place):
                if is_good or data.draw(st.booleans()):
                    disk.kept[place] = record

    @rule(chain=chains(min_length=3), start=st.sampled_from([0, 0, 1, 2]), data=st.data())
    def read(self, chain: list[bytes], start: int, data: st.DataObject) -> None:
        names = Grid.of(POSITIONS, 1).names(chain)
        depth = self.directory.depth(names)
        if depth <= start:
            return
        stop = data.draw(st.integers(start + 1, depth))
        self.directory.touch(names)
        reading = self.directory.read(names, start, stop)
        records = {}
        pairs = zip(reading.places.tolist(), reading.generations.tolist(), strict=True)
        for name, (place, generation) in zip(names[start:stop], pairs, strict=True):
            for disk in self.ranks_of(place):
                record = disk.kept.get(place)
                assert record is not None, f"nothing lies in place {place}"
                assert (record.generation, record.name) == (generation, name), f"{record} in place {place}"
                records[place] = record
        self.in_flight.append(Read(reading, records, self.life))

    @precondition(lambda self: self.under_way(Read))
    @rule(data=st.data())
    def end_read(self, data: st.DataObject) -> None:
        read = data.draw(st.sampled_from(self.under_way(Read)))
        self.in_flight.remove(read)
        for place, record in read.records.items():
            assert all(disk.kept[place] == record for disk in self.ranks_of(place)), "changed while read"
        self.directory.end_read(read.reading)

    @rule(chain=chains(), index=st.integers(0, 8))
    def drop(self, chain: list[bytes], index: int) -> None:
        names = Grid.of(POSITIONS, 1).names(chain)
        depth = self.directory.depth(names)
        if index >= len(names):
            return
        self.directory.drop(names, index)
        if index < depth:
            self.cut({names[index]})
        assert self.directory.depth(names) == min(depth, index)

    @rule(is_it=SELDOM)
    def reset(self, is_it: bool) -> None:
        if not is_it:
            return
        self.directory.reset()
        self.suffix = PRIVATE
        self.is_unused = True
        self.life += 1
        self.committed = set()
        assert self.directory.is_private and self.directory.num_used == 0

    @precondition(lambda self: self.is_unused)
    @rule(version=st.sampled_from("AB"))
    def name_weights(self, version: str) -> None:
        """Nothing was written since the reset: it has what was written under that name."""
        self.suffix = suffix_of(version)
        self.directory.name_weights(self.suffix)
        self.is_unused = False
        self.life += 1
        self.take_up({place: each for place, each in self.noted.items() if self.alike().get(place) == each})
        assert not self.directory.is_private and self.directory.num_used == len(self.committed)

    @precondition(lambda self: self.committed)
    @rule(is_it=SELDOM, data=st.data())
    def restart(self, is_it: bool, data: st.DataObject) -> None:
        """Killed, and started again. Of what was under way any part may have landed."""
        if not is_it:
            return
        for each in self.in_flight:
            if isinstance(each, Write):
                self.land(each, False, data)
        self.start()
        assert self.directory.num_used == len(self.committed)
        assert not self.directory.is_private

    @rule()
    def tidy(self) -> None:
        self.now += 1.0
        self.directory.tidy()

    @invariant()
    def holds(self) -> None:
        self.directory.check_invariants()

    @rule(chain=chains())
    def depths_are_those_of_the_model(self, chain: list[bytes]) -> None:
        names = Grid.of(POSITIONS, 1).names(chain)
        depth, expected = self.directory.depth(names), self.model_depth(names)
        assert depth <= expected <= len(names)
        assert depth <= self.directory.known_depth(names)
        if not self.directory.num_evicted:
            assert depth == expected
