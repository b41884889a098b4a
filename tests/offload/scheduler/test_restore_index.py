"""Who brings a block is found as if every block of every restore had been looked at."""

from collections import UserList
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.scheduler.restore import Restore
from offload.scheduler.restore_index import STRIDE, RestoreIndex

LENGTH = 3 * STRIDE


def chain_of(*turns: int) -> list[bytes]:
    """Of length ``LENGTH``. A turn is a position from which on the chain is another one."""
    hashes, branch = [], 0
    for position in range(LENGTH):
        branch += (position in turns) * (position + 1)
        hashes.append(b"%d/%d" % (position, branch))
    return hashes


def restore_of(chain: list[bytes], first: int, stop: int) -> Restore:
    return Restore(None, first, chain[:stop], np.arange(first, stop))


CHAINS = [chain_of(), chain_of(5), chain_of(5, 20), chain_of(17), chain_of(STRIDE), chain_of(2 * STRIDE + 1)]
PLACES = st.tuples(st.sampled_from(CHAINS), st.integers(0, LENGTH - 1), st.integers(1, LENGTH), st.booleans())


@given(st.lists(PLACES, max_size=12), st.data())
def test_the_index_finds_what_a_look_at_every_restore_finds(places: list[Any], data: st.DataObject) -> None:
    index, restores, brought = RestoreIndex(), [], dict[bytes, Restore]()
    for chain, first, size, may_overlap in places:
        restore = restore_of(chain, first, min(first + size, LENGTH))
        blocks = restore.chain[first:]
        if not may_overlap and any(block in brought for block in blocks):
            continue  # it would wait for the other one
        overlaps = any(block in brought for block in blocks)
        index.add(restore)
        restores.append((restore, overlaps))
        brought.update(dict.fromkeys(blocks, restore))
        index.check_invariants([each for each, _ in restores])
        if data.draw(st.booleans()):
            gone, _ = restores.pop(data.draw(st.integers(0, len(restores) - 1)))
            index.remove(gone)
            index.remove(gone)
            brought = {block: each for block, each in brought.items() if each is not gone}
            index.check_invariants([each for each, _ in restores])
    is_exact = not any(overlaps for _, overlaps in restores) and not any(place[3] for place in places)
    for chain in CHAINS:
        for position in range(LENGTH + 1):
            found = index.find(chain, position)
            if found is not None:
                assert any(found is each for each, _ in restores)
                assert found.brings(chain, position)
            if is_exact:
                assert found is (brought.get(chain[position]) if position < LENGTH else None)


class Counted(UserList[bytes]):
    """Counts how many of its hashes are looked at."""

    num_read = 0

    def __getitem__(self, at: Any) -> Any:
        self.num_read += 1
        return super().__getitem__(at)


def family(size: int) -> Iterator[tuple[Restore, list[bytes]]]:
    """Restores that begin where a shared beginning ends, as those of requests with one system prompt do."""
    for number in range(size):
        chain = [b"shared %d" % at for at in range(64)] + [b"%d of %d" % (at, number) for at in range(500)]
        yield restore_of(chain, 64, len(chain)), chain


@pytest.mark.parametrize("size", [2, 200])
def test_a_question_costs_the_same_however_many_restores_there_are(size: int) -> None:
    index = RestoreIndex()
    restores = list(family(size))
    for restore, _ in restores:
        index.add(restore)
    for restore, chain in restores:
        for position in (64, 64 + STRIDE, 100, 563):
            counted = Counted(chain)
            assert index.find(counted, position) is restore  # type: ignore[arg-type]
            assert counted.num_read <= STRIDE + 1
        stranger = Counted([*chain[:64], *[b"another %d" % at for at in range(500)]])
        assert index.find(stranger, 64) is None  # type: ignore[arg-type]
        assert stranger.num_read <= STRIDE + 1


def test_what_is_shared_follows_what_is_wanted() -> None:
    """Against a look at every follower."""
    restore = restore_of(chain_of(), 0, LENGTH)
    restore.parts_left = 1
    depths = [20, 5, 20, 31, 5, 40]
    for number, depth in enumerate(depths):
        restore.follow(f"r{number}", depth)
    assert restore.depths == [5, 20, 31, 40]
    for parts_left in (1, 0):
        restore.parts_left = parts_left
        for landed in range(LENGTH + 1):
            restore.num_blocks_landed = landed
            wanted = [depth for depth in depths if depth <= landed or not parts_left]
            assert restore.num_wanted == min(max(wanted, default=0), landed)


def test_nobody_wants_what_nobody_follows() -> None:
    restore = restore_of(chain_of(), 0, LENGTH)
    restore.num_blocks_landed = LENGTH
    assert restore.num_wanted == 0


def test_common_blocks_are_counted_from_what_is_known() -> None:
    restore = restore_of(chain_of(), 10, LENGTH)
    for turn in range(11, LENGTH):
        for known in (0, 10, turn - 1):
            assert restore.num_common(chain_of(turn), known) == turn - 10
    assert restore.num_common(chain_of(), 12) == LENGTH - 10
    assert restore.num_common(chain_of()[:5]) == 0


def test_the_end_of_one_restore_takes_no_mark_of_a_later_one() -> None:
    index, chain = RestoreIndex(), chain_of()
    earlier, later = restore_of(chain, STRIDE, LENGTH), restore_of(chain, 0, LENGTH)
    index.add(earlier)
    index.add(later)
    index.remove(earlier)
    assert all(index.find(chain, position) is later for position in range(LENGTH))
