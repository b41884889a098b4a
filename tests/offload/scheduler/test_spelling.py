"""Token ids of what slots hold: told for as long as the job that filled them is the last to have done so."""

import numpy as np
import pytest

from allocator import StorePlan
from offload.messages import Ids
from offload.scheduler.spelling import SlotTokens, Spelling

SIZE = 3


@pytest.fixture
def filled_by() -> Ids:
    return np.full(8, -1, dtype=np.int64)


@pytest.fixture
def tokens(filled_by: Ids) -> SlotTokens:
    tokens = SlotTokens(filled_by, SIZE)
    tokens.want()
    return tokens


def plan_of(slots: list[int]) -> StorePlan:
    hashes = [b"%d" % slot for slot in slots]
    return StorePlan(0, 2, hashes, np.array(slots, dtype=np.int64).reshape(-1, 1), [])


def keep(tokens: SlotTokens, filled_by: Ids, slots: list[int], job: int, spelling: Spelling | None) -> None:
    filled_by[slots] = job
    tokens.keep(plan_of(slots)._replace(note=spelling))


def of(tokens: SlotTokens, *slots: int) -> list[int] | None:
    found = tokens.of(np.array(slots, dtype=np.int64))
    return None if found is None else list(found.token_ids)


def test_parts_are_counted_from_the_beginning_or_from_the_end() -> None:
    spelling = Spelling(list(range(12)), SIZE, [("a",), None, None, ("b",)], 3, "adapter")
    assert spelling.num_positions == 4
    assert spelling.part(1, 3) == Spelling([3, 4, 5, 6, 7, 8], SIZE, [None, None], 3, "adapter")
    assert spelling.ending(2) == spelling.part(2, 4)
    assert spelling.ending(2, 1) == spelling.part(1, 3)
    with pytest.raises(AssertionError, match="of 4 positions"):
        spelling.ending(5)


def test_what_was_kept_is_told(tokens: SlotTokens, filled_by: Ids) -> None:
    """Of a spelling that begins before the plan, what is at its end is meant."""
    keep(tokens, filled_by, [5, 2], 7, Spelling(list(range(9)), SIZE))
    assert of(tokens, 5, 2) == [3, 4, 5, 6, 7, 8]
    assert of(tokens, 2) == [6, 7, 8]
    assert of(tokens, 2, 3) is None, "nobody has filled that"


def test_what_others_filled_since_is_not(tokens: SlotTokens, filled_by: Ids) -> None:
    keep(tokens, filled_by, [1, 2], 7, Spelling(list(range(6)), SIZE))
    keep(tokens, filled_by, [2], 8, None)
    assert of(tokens, 1) == [0, 1, 2]
    assert of(tokens, 1, 2) is None
    filled_by[1] = 9
    assert of(tokens, 1) is None


def test_what_has_more_than_token_ids_is_not(tokens: SlotTokens, filled_by: Ids) -> None:
    keep(tokens, filled_by, [1, 2], 7, Spelling(list(range(6)), SIZE, [("salt",), None]))
    assert of(tokens, 1) is None
    assert of(tokens, 2) == [3, 4, 5]
    keep(tokens, filled_by, [3], 8, Spelling([1, 2, 3], SIZE, None, 1, "adapter"))
    assert of(tokens, 3) is None


def test_columns_that_are_absent_are_not(tokens: SlotTokens, filled_by: Ids) -> None:
    filled_by[[4]] = 7
    tokens.keep(plan_of([4, -1])._replace(note=Spelling(list(range(6)), SIZE)))
    assert of(tokens, 4) == [0, 1, 2]
    assert of(tokens, 4, -1) is None and of(tokens, 7) is None


def test_nothing_is_kept_unless_somebody_wants_it(filled_by: Ids) -> None:
    tokens = SlotTokens(filled_by, SIZE)
    keep(tokens, filled_by, [1], 7, Spelling([1, 2, 3], SIZE))
    assert of(tokens, 1) is None
    tokens.want()
    assert of(tokens, 1) is None
    keep(tokens, filled_by, [1], 8, Spelling([1, 2, 3], SIZE))
    tokens.want()
    assert of(tokens, 1) == [1, 2, 3]
