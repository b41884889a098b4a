"""Leases of what was handed off: it stays in the pool until a peer has it, or their time is over."""

from collections.abc import Sequence
from dataclasses import dataclass

from allocator import Pin
from offload.scheduler.common import Common
from offload.scheduler.tiers.names import name_of


@dataclass(frozen=True, slots=True, eq=False)
class Lease:
    """Leading positions of a chain that stay.

    Attributes:
        name: of the last of them.
        pin: keeps them.
        ends_at: when it is over, at the latest.
    """

    name: bytes
    pin: Pin
    ends_at: float


class Leases:
    """All of one engine, which have a part of the pool together at most.

    They end by themselves, at the next step or as soon as room is looked for. Then what they kept is as
    anything else.
    """

    def __init__(self, common: Common, share: float, seconds: float) -> None:
        """None yet; ``share``: of the pool's slots, 0 to 1, ``seconds``: how long each lasts."""
        self._leases = common.allocator.leases
        self._columns = common.allocator.columns
        self._metrics = common.metrics
        self._clock = common.clock
        self.seconds = seconds
        """That each lasts at most."""
        self._ending: dict[Lease, None] = {}  # the first to end first
        self._by_name: dict[bytes, list[Lease]] = {}
        self.most_slots = int(common.allocator.capacity * share)
        """Slots that they have together at most."""

    def __len__(self) -> int:
        """Those that have not ended."""
        return len(self._ending)

    def depth(self, chain: Sequence[bytes], stop: int) -> int:
        """How many of the first positions could be leased as they are; see ``allocator.leases``."""
        return self._leases.depth(chain, stop)

    def has_room_for(self, num_slots: int) -> bool:
        """Whether so many more could be leased now."""
        return self._leases.num_slots + num_slots <= self.most_slots

    def would_fit(self, chain: Sequence[bytes], known: int, stop: int) -> bool:
        """Whether the first ``stop`` positions could be leased, of which ``known`` are there. O(log n)."""
        self.expire()
        num_more = (stop - known) * self._columns
        if not known:
            return self.has_room_for(num_more)
        pin = self._leases.begin(chain, known)
        has_room = self.has_room_for(num_more)
        self._leases.end(pin)
        return has_room

    def grant(self, chain: Sequence[bytes], stop: int) -> None:
        """Lease the first ``stop`` positions, which are resident or filling, and fit."""
        name = name_of(chain[stop - 1])
        lease = Lease(name, self._leases.begin(chain, stop), self._clock() + self.seconds)
        self._ending[lease] = None
        self._by_name.setdefault(name, []).append(lease)

    def release(self, names: Sequence[bytes]) -> None:
        """Peers have all that was leased under each of these. Unknown names are passed over."""
        for name in names:
            if name in self._by_name:
                self._end(self._by_name[name][0])

    def expire(self) -> None:
        """End those whose time is over. O(these)."""
        now = self._clock()
        while self._ending and (first := next(iter(self._ending))).ends_at <= now:
            self._end(first)
            self._metrics.count("expired_leases")

    def reset(self) -> None:
        """What they keep is worth nothing."""
        for lease in list(self._ending):
            self._end(lease)

    def check_invariants(self) -> None:
        """They are in order, known by name, and have no more than their share."""
        ends = [lease.ends_at for lease in self._ending]
        assert ends == sorted(ends), f"leases end at {ends}"
        named = {lease for leases in self._by_name.values() for lease in leases}
        assert named == set(self._ending), f"{len(named)} leases have names, {len(self._ending)} there are"
        assert all(self._by_name.values()), "a name has no lease"
        assert len(self._leases) == len(self._ending), f"the pool has {len(self._leases)} leases"
        num_slots = self._leases.num_slots
        assert num_slots <= self.most_slots, f"{num_slots} slots are leased, {self.most_slots} may be"

    def left_over(self) -> dict[str, object]:
        """Those that have not ended. For tests."""
        return {"leases": list(self._ending)}

    def _end(self, lease: Lease) -> None:
        del self._ending[lease]
        named = self._by_name[lease.name]
        named.remove(lease)
        if not named:
            del self._by_name[lease.name]
        self._leases.end(lease.pin)
