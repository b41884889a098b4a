"""What a restore knows of its parts, and of other chains."""

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from offload.scheduler.restore import Restore

"""A restore keeps its pin for others."""


def restore_of(num_blocks: int, first: int = 0) -> Restore:
    hashes = [b"root"] * first + [bytes([index]) for index in range(num_blocks)]
    return Restore("a request", first, hashes, np.arange(num_blocks))


@given(sizes=st.lists(st.integers(1, 3), min_size=1, max_size=5), data=st.data())
def test_the_leading_blocks_that_are_good_are_those_before_the_first_that_is_not_here(
    sizes: list[int], data: st.DataObject
) -> None:
    stops = np.cumsum([0, *sizes]).tolist()
    restore = restore_of(stops[-1])
    restore.parts_left = len(sizes)
    here: set[int] = set()
    for num_left, (start, stop) in zip(
        reversed(range(len(sizes))), data.draw(st.permutations(list(pairwise(stops)))), strict=True
    ):
        good_stop = data.draw(st.sampled_from([stop, stop, start, stop - 1]))
        restore.end_part(start, good_stop)
        here.update(range(start, good_stop))
        expected = next(index for index in range(stops[-1] + 1) if index not in here)
        assert (restore.num_landed, restore.parts_left) == (expected, num_left)


def test_a_restore_has_the_beginning_of_a_chain_in_common() -> None:
    chain = [b"root", *(bytes([index]) for index in range(6)), b"more"]
    restore = restore_of(6, first=1)
    assert restore.num_common(chain) == 6
    for size in range(1, 7):
        assert restore.num_common(chain[:size]) == size - 1
        assert restore.num_common([*chain[:size], *(b"other %d" % at for at in range(8))]) == size - 1
