"""How large an engine's pool is to be, and who may say so."""

import math
import threading
import time
from collections.abc import Callable
from typing import NamedTuple

from offload.errors import HostMemoryError, OperatorError

LEAST_SHARE = 0.25
"""Of ``cpu_gib``: what pressure on memory leaves of the pool at least."""

_RECENT_SECONDS = 10.0  # what steps have said of pins is believed for so long


class PoolBounds(NamedTuple):
    """Between which sizes a pool may be.

    Attributes:
        start_gib: what it has at the start.
        most_gib: what it may have at most.
        num_slots: at the start.
        most_slots: at most.
        unit_slots: of which the memory is given back and taken together; 0: it keeps its size.
        least_slots: that the smallest store takes.
        slot_bytes: of a slot on all ranks.
    """

    start_gib: float
    most_gib: float
    num_slots: int
    most_slots: int
    unit_slots: int
    least_slots: int
    slot_bytes: int

    @property
    def least(self) -> int:
        """Slots that it may have at least."""
        return self.in_units(max(self.unit_slots, self.least_slots), up=True)

    def slots_of(self, gib: float) -> int:
        """In so much memory, at most."""
        return self.in_units(int(self.num_slots * gib / self.start_gib))

    def in_units(self, num_slots: int, *, up: bool = False) -> int:
        """The next number of slots that there can be, down or up."""
        unit = max(1, self.unit_slots)
        if num_slots >= self.most_slots:
            return self.most_slots
        return min(self.most_slots, (num_slots + (unit - 1) * up) // unit * unit)

    def gib_of(self, num_slots: int) -> float:
        """Memory of so many slots."""
        return self.start_gib * num_slots / self.num_slots


class Sizes(NamedTuple):
    """Which sizes a pool may have besides that at the start, and who says so.

    Attributes:
        most_slots: that it may have.
        unit_slots: of ``PoolBounds``.
        target: how large it is to be.
    """

    most_slots: int
    unit_slots: int
    target: "PoolTarget"


class PoolTarget:
    """How large the pool is to be, as an operator or pressure on memory says, on any thread.

    The engine's thread takes it up with its next step. An engine that makes none keeps what it has.
    """

    def __init__(
        self,
        check_room: Callable[[int], None],
        fixed_because: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Nobody has said anything.

        Args:
            check_room: raises HostMemoryError if the machine has not so many bytes more.
            fixed_because: why the pool keeps its size; None: it need not.
            clock: in seconds.
        """
        self._lock = threading.Lock()
        self._check_room = check_room
        self._fixed_because = fixed_because
        self._bounds: PoolBounds | None = None
        self._asked: int | None = None  # slots; not taken up yet
        self._target = 0  # slots
        self._capacity = 0  # slots that there are
        self._error = ""
        self._clock = clock
        self._pinned = (0, -math.inf)  # slots, and when the engine's thread said so

    def begin(self, bounds: PoolBounds, capacity: int) -> None:
        """The pool has been made, with so many slots."""
        with self._lock:
            self._bounds = bounds
            self._target = self._capacity = capacity
            if not bounds.unit_slots and self._fixed_because is None:
                self._fixed_because = (
                    "ranks share its memory, or it is smaller than a piece that can be given back, or it is "
                    "pinned in large pieces; for the last, set cpu_gib_max or shrink_under_pressure, and the "
                    "engine pins it in small ones"
                )

    def ask(self, gib: object) -> dict[str, object]:
        """It is to have so much memory. Returns how it stands. Reads a few small files.

        Raises:
            OperatorError: it cannot have that, or not now.
        """
        bounds = self._resizable()
        is_number = isinstance(gib, int | float) and not isinstance(gib, bool)
        if not is_number or not math.isfinite(gib) or gib <= 0:  # type: ignore[arg-type, operator]
            raise OperatorError(f"gib is {gib!r}; give the pool's size in GiB, a number above 0")
        assert isinstance(gib, int | float)
        if gib > bounds.most_gib:
            raise OperatorError(
                f"{gib:g} GiB is more than cpu_gib_max, {bounds.most_gib:g}; give at most that, or start "
                f"the engine with a larger cpu_gib_max"
            )
        num_slots = bounds.slots_of(gib)
        if num_slots < bounds.least:
            raise OperatorError(
                f"{gib:g} GiB is less than the pool can have; give {bounds.gib_of(bounds.least):.3g} at least"
            )
        num_pinned, said_at = self._pinned
        # an engine that makes no steps does not say when pins are over; then the shrink waits for them
        if num_slots < num_pinned and self._clock() - said_at < _RECENT_SECONDS:
            pinned = bounds.gib_of(bounds.in_units(num_pinned, up=True))
            raise OperatorError(
                f"{gib:g} GiB is less than what requests have pinned; give {pinned:.3g} at least, or wait "
                f"until their pins are over"
            )
        num_more = num_slots - self._capacity
        if num_more > 0:
            try:
                self._check_room(num_more * bounds.slot_bytes)
            except HostMemoryError as error:
                raise OperatorError(f"{gib:g} GiB does not fit: {error}") from error
        with self._lock:
            self._asked = self._target = num_slots
            self._error = ""
            return self._told()

    def yield_memory(self, share: float) -> bool:
        """Memory is short: the pool is to be smaller by that share than it is now.

        False if it is as small as it may be, or is still getting smaller: what it gives up then is yet to be
        seen. It is asked for less than it has, so it never grows by this.
        """
        with self._lock:
            bounds = self._bounds
            if bounds is None or self._fixed_because is not None:
                return False
            least = max(bounds.least, bounds.in_units(int(bounds.num_slots * LEAST_SHARE), up=True))
            target = max(least, bounds.in_units(int(self._capacity * (1 - share))))
            if self._target < self._capacity or target >= self._capacity:
                return False
            self._asked = self._target = target
            return True

    def tell_pinned(self, num_slots: int) -> None:
        """So many have hints pinned. With each step, on the engine's thread."""
        self._pinned = (num_slots, self._clock())

    @property
    def is_asked(self) -> bool:
        """Whether somebody has said something that was not taken up yet."""
        return self._asked is not None

    def take(self) -> int | None:
        """How many slots it is to have, once. On the engine's thread."""
        if self._asked is None:
            return None
        with self._lock:
            asked, self._asked = self._asked, None
            return asked

    def tell(self, capacity: int, error: str = "") -> None:
        """So many slots there are; ``error``: why they are not as many as was asked for."""
        with self._lock:
            self._capacity = capacity
            if error and self._asked is None:
                self._error, self._target = error, capacity

    def note(self, problem: str) -> None:
        """That keeps it from its size for the time being; "": nothing does any more."""
        with self._lock:
            self._error = problem

    def settle(self, capacity: int) -> None:
        """It stays at so many slots. A unit that is not whole makes them a few more or fewer than asked."""
        with self._lock:
            self._capacity = capacity
            if self._asked is None:
                self._target = capacity

    @property
    def told(self) -> dict[str, object]:
        """How it stands, for operators."""
        with self._lock:
            return self._told()

    def check_invariants(self) -> None:
        """What was asked for is the target, and within bounds."""
        with self._lock:
            assert self._asked is None or self._asked == self._target, f"{self._asked}, not {self._target}"
            assert self._bounds is None or self._target <= self._bounds.most_slots, f"{self._target} slots"

    def _told(self) -> dict[str, object]:
        bounds = self._bounds
        if bounds is None:
            return {"gib": None, "target_gib": None, "most_gib": None, "error": "", "fixed": None}
        return {
            "gib": round(bounds.gib_of(self._capacity), 6),
            "target_gib": round(bounds.gib_of(self._target), 6),
            "most_gib": bounds.most_gib,
            "error": self._error,
            "fixed": self._fixed_because,
        }

    def _resizable(self) -> PoolBounds:
        if self._fixed_because is not None:
            raise OperatorError(f"the pool keeps its size: {self._fixed_because}")
        if self._bounds is None:
            raise OperatorError("the pool is yet to be made: no step has begun; ask again after a request")
        return self._bounds
