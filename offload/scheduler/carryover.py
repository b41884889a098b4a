"""What ends of restores leave to do in the allocator: so much of it in a step, the rest carried over."""

from collections import deque
from collections.abc import Callable, Sequence

from allocator import CpuOffloadingBlockAllocator, Pin

STEP_WORK = 1 << 15
"""What may be done in one step: pins and drops at ``_CALL_WORK`` each, and slots given back at 1."""

_CALL_WORK = 256


class Carryover:
    """Pins to end, and bad slots to drop.

    They are dealt with at once as long as the step has time for it. Hundreds of restores may end in one step;
    what is too much for it waits for the next ones, pins after drops. A pin that lives a step longer keeps
    slots from eviction, and nothing else. Nobody may be offered KV while drops wait: it could be theirs.
    """

    def __init__(self, allocator: CpuOffloadingBlockAllocator, step_work: int = STEP_WORK) -> None:
        """Nothing waits; ``step_work``: 1 at least."""
        self._allocator = allocator
        self.step_work = step_work
        self._left = step_work
        self._pins: deque[Pin] = deque()
        self._drops: deque[tuple[Callable[[Sequence[bytes], int], None], Sequence[bytes], int]] = deque()

    def __len__(self) -> int:
        """Pins and drops that wait."""
        return len(self._pins) + len(self._drops)

    @property
    def num_pins(self) -> int:
        """Pins that wait."""
        return len(self._pins)

    @property
    def has_drops(self) -> bool:
        """Whether the pool may still have slots that are known to be bad."""
        return bool(self._drops)

    def drop(self, chain: Sequence[bytes], position: int) -> None:
        """As the allocator's ``drop``, now or in one of the next steps."""
        self._later(self._allocator.drop, chain, position)

    def drop_bag(self, chain: Sequence[bytes], depth: int) -> None:
        """As the allocator's ``drop_bag``, now or in one of the next steps."""
        self._later(self._allocator.drop_bag, chain, depth)

    def unpin(self, pin: Pin) -> None:
        """As the allocator's ``unpin``, now or in one of the next steps."""
        self._pins.append(pin)
        if self._left > 0:
            self._work()

    def tidy(self) -> bool:
        """A step ends: go on with what waits, as long as the next one has time for it.

        Returns whether slots were dropped that had to wait.
        """
        had_drops = self.has_drops
        self._left = self.step_work
        self._work()
        return had_drops

    def check_invariants(self) -> None:
        """Nothing waits while there is time for it."""
        assert not len(self) or self._left <= 0, f"{len(self)} wait with work of {self._left} left"

    def _later(self, drop: Callable[[Sequence[bytes], int], None], chain: Sequence[bytes], at: int) -> None:
        self._drops.append((drop, chain, at))
        if self._left > 0:
            self._work()

    def _work(self) -> None:
        while self._left > 0 and len(self):
            self._left -= _CALL_WORK
            if self._drops:
                drop, chain, at = self._drops.popleft()
                drop(chain, at)
            else:
                pin = self._pins.popleft()
                self._left -= len(pin.slots) - pin.kept
                self._allocator.unpin(pin)
