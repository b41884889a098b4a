"""What prefix hashes are made of, for KV events: token ids, and what else goes into them."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from allocator import StorePlan
from offload.messages import Ids

_NO_JOB = -2
"""Never fills a slot."""


class Spelling(NamedTuple):
    """What the hashes of consecutive chain positions are made of.

    Attributes:
        token_ids: of all of them, one position behind the other.
        size: tokens of a position.
        extra_keys: what else goes into the hash of each position, in the engine's words; None: nothing.
        lora_id: the engine's number of the adapter; None: there is none.
        lora_name: its name.
    """

    token_ids: Sequence[int]
    size: int
    extra_keys: Sequence[tuple[Any, ...] | None] | None = None
    lora_id: int | None = None
    lora_name: str | None = None

    @property
    def num_positions(self) -> int:
        """That it has."""
        return len(self.token_ids) // self.size

    def part(self, start: int, stop: int) -> "Spelling":
        """Of its positions ``start <= i < stop``. O(tokens of these), in C."""
        assert 0 <= start <= stop <= self.num_positions, f"{start}:{stop} of {self.num_positions} positions"
        keys = None if self.extra_keys is None else self.extra_keys[start:stop]
        return self._replace(token_ids=self.token_ids[start * self.size : stop * self.size], extra_keys=keys)

    def ending(self, num: int, num_behind: int = 0) -> "Spelling":
        """Of the ``num`` positions that have ``num_behind`` others behind them. The same."""
        stop = self.num_positions - num_behind
        return self.part(stop - num, stop)


class SlotTokens:
    """Token ids of what the pool's slots hold: what tiers are given of it is told with them.

    A row counts for as long as the slot is filled by the job that it was noted with. Positions whose hashes
    are made of more than token ids are not noted, nor those that nobody spelled. 4 bytes for each token of
    the pool, and 8 for each slot, once somebody wants them.
    """

    def __init__(self, filled_by: Ids, position_tokens: int) -> None:
        """Nothing is noted. ``filled_by``: of ``Common``, which it reads."""
        self._filled_by = filled_by
        self._position_tokens = position_tokens
        self._rows: npt.NDArray[np.int32] | None = None
        self._jobs: Ids = np.empty(0, dtype=np.int64)

    def want(self) -> None:
        """Note them from now on. O(slots)."""
        if self._rows is None:
            self._rows = np.empty((len(self._filled_by), self._position_tokens), dtype=np.int32)
            self._jobs = np.full(len(self._filled_by), _NO_JOB, dtype=np.int64)

    def check_invariants(self) -> None:
        """There is a row for every slot, if somebody wants them."""
        sizes = len(self._jobs), None if self._rows is None else len(self._rows)
        assert sizes in ((0, None), (len(self._filled_by),) * 2), (
            f"{sizes} rows of {len(self._filled_by)} slots"
        )

    def keep(self, plan: StorePlan) -> None:
        """The slots of ``plan`` are filled. O(tokens), as array work, if somebody wants them."""
        spelling = plan.note
        if self._rows is None or not isinstance(spelling, Spelling) or not plan.slots.size:
            return
        if spelling.lora_name is not None:
            return
        own = spelling.ending(len(plan.hashes))
        slots = plan.slots[:, 0]
        is_plain = slots >= 0
        if own.extra_keys is not None:
            is_plain &= np.array([not keys for keys in own.extra_keys])
        rows = np.array(own.token_ids, dtype=np.int32).reshape(len(slots), self._position_tokens)
        self._rows[slots[is_plain]] = rows[is_plain]
        self._jobs[slots[is_plain]] = self._filled_by[slots[is_plain]]

    def of(self, slots: Ids) -> Spelling | None:
        """Of consecutive positions that begin with these slots; None: not all are known. O(tokens), in C."""
        if self._rows is None or slots.min(initial=0) < 0:
            return None
        if not np.array_equal(self._jobs[slots], self._filled_by[slots]):
            return None
        return Spelling(self._rows[slots].reshape(-1).tolist(), self._position_tokens)
