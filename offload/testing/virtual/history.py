"""Who did what to a block, for the day a tag is wrong."""

from collections import defaultdict, deque
from collections.abc import Iterable

from offload.messages import GPU, POOL, Order

_KEPT = 16


class WrongBytesError(AssertionError):
    """A position that counts as computed does not hold what was computed for it."""


class History:
    """The last few things that happened to every GPU block and every slot."""

    def __init__(self) -> None:
        self.step = 0
        self._blocks: dict[int, deque[tuple[int, str]]] = defaultdict(lambda: deque(maxlen=_KEPT))
        self._slots: dict[int, deque[tuple[int, str]]] = defaultdict(lambda: deque(maxlen=_KEPT))

    def blocks(self, block_ids: Iterable[int], what: str) -> None:
        """``what`` happened to these GPU blocks."""
        for block_id in block_ids:
            self._blocks[block_id].append((self.step, what))

    def slots(self, slots: Iterable[int], what: str) -> None:
        """``what`` happened to these slots."""
        for slot in slots:
            self._slots[slot].append((self.step, what))

    def order(self, order: Order) -> None:
        """These blocks and slots are copied."""
        jobs = [part.job_id for part in order.parts]
        sources, targets = order.sources.tolist(), order.targets.tolist()
        verb, source, target, for_whom = *order.route, order.request_id
        told = {GPU: self.blocks, POOL: self.slots}
        if source in told:
            told[source](sources, f"jobs {jobs} {verb} it to {target} for {for_whom}")
        if target in told:
            told[target](targets, f"jobs {jobs} {verb} it for {for_whom} from {source} {sources}")

    def of_block(self, block_id: int) -> str:
        """Printable, oldest first."""
        return _lines(f"GPU block {block_id}", self._blocks[block_id])

    def of_slot(self, slot: int) -> str:
        """Printable, oldest first."""
        return _lines(f"slot {slot}", self._slots[slot])


def _lines(name: str, events: Iterable[tuple[int, str]]) -> str:
    return "\n".join([f"history of {name}:", *(f"  step {step:>5}  {what}" for step, what in events)])
