"""The offline optimum against every cache there could be, and block by block against MIN.

A block is written as the tuple of letters that lead to it, so its last letter off is the block before it.
"""

from collections.abc import Iterator, Sequence
from itertools import accumulate

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from benchmarks.trace_replay.optimum import OfflineOptimum
from tests.strategies import thorough

Block = tuple[str, ...]
Chain = list[Block]
Contents = frozenset[Block]

EMPTY: Contents = frozenset()


def chain_of(letters: Sequence[str]) -> Chain:
    return list(accumulate((letter,) for letter in letters))


def requests(alphabet: str, most: int, longest: int) -> st.SearchStrategy[list[Chain]]:
    chain = st.lists(st.sampled_from(alphabet), max_size=longest).map(chain_of)
    return st.lists(chain, min_size=4, max_size=most)


def is_prefix_closed(contents: Contents) -> bool:
    return all(len(block) == 1 or block[:-1] in contents for block in contents)


def leading_hits(chain: Chain, contents: Contents) -> int:
    missing = (position for position, block in enumerate(chain) if block not in contents)
    return next(missing, len(chain))


def demanded(chain: Chain, capacity: int, bypass: bool) -> Contents:
    """What has to be resident after a request."""
    return EMPTY if bypass else frozenset(chain[:capacity])


def allowed(before: Contents, chain: Chain, capacity: int, bypass: bool) -> set[Contents]:
    """Every state a cache may be in after the request."""
    states = {EMPTY}
    for block in sorted(before.union(chain), key=len):
        states |= {
            state | {block}
            for state in states
            if len(state) < capacity and (len(block) == 1 or block[:-1] in state)
        }
    return {state for state in states if state >= demanded(chain, capacity, bypass)}


def best_of_all(chains: list[Chain], capacity: int, bypass: bool) -> int:
    """The most hits in total, by following every state that could be."""
    best = {EMPTY: 0}
    for chain in chains:
        reached: dict[Contents, int] = {}
        for before, hits in best.items():
            hits += leading_hits(chain, before)
            for state in allowed(before, chain, capacity, bypass):
                reached[state] = max(hits, reached.get(state, 0))
        best = reached
    return max(best.values())


def states_of_min(chains: list[Chain], capacity: int, bypass: bool) -> Iterator[Contents]:
    """What MIN holds after each request if it gives up block by block, among equals the deepest first."""
    contents = EMPTY
    for number, chain in enumerate(chains):
        uses = {block: later for later in range(len(chains) - 1, number, -1) for block in chains[later]}
        contents |= frozenset(chain)
        kept = demanded(chain, capacity, bypass)
        while len(contents) > capacity:
            leaving = max(contents - kept, key=lambda block: (uses.get(block, len(chains)), len(block)))
            contents -= {leaving}
        yield contents


@pytest.mark.parametrize("bypass", [True, False])
@thorough(max_examples=500)
@given(chains=requests("abc", most=7, longest=4), capacity=st.integers(1, 4))
@example(chains=[chain_of(letters) for letters in ("a", "b", "c", "a")], capacity=2)
def test_no_cache_has_more_hits(bypass: bool, chains: list[Chain], capacity: int) -> None:
    hits = OfflineOptimum(chains).hits(capacity, bypass=bypass)
    assert sum(hits) == best_of_all(chains, capacity, bypass)


@pytest.mark.parametrize("bypass", [True, False])
@thorough(max_examples=200)
@given(chains=requests("aabc", most=25, longest=8), capacity=st.integers(1, 12))
def test_a_prefix_closed_cache_has_these_hits(bypass: bool, chains: list[Chain], capacity: int) -> None:
    """Blocks are counted, not named: a cache that names them has as many at each request."""
    before = EMPTY
    hits: list[int] = []
    for chain, after in zip(chains, states_of_min(chains, capacity, bypass), strict=True):
        hits.append(leading_hits(chain, before))
        assert is_prefix_closed(after)
        assert len(after) <= capacity
        assert demanded(chain, capacity, bypass) <= after <= before.union(chain)
        before = after
    assert OfflineOptimum(chains).hits(capacity, bypass=bypass) == hits


def passes(*documents: str, times: int) -> OfflineOptimum:
    return OfflineOptimum([chain_of(document) for document in documents] * times)


def test_documents_in_a_cycle() -> None:
    """With bypass the share of hits is pool over documents: 2 of 4. Without, each request takes one place of
    the pool from documents that wait, 1 of the 3 others.
    """
    optimum = passes("a", "b", "c", "d", times=3)
    assert optimum.hits(2) == [0, 0, 0, 0, 1, 1, 0, 0, 1, 1, 0, 0]
    assert optimum.hits(2, bypass=False) == [0, 0, 0, 0, 1, 0, 0, 1, 0, 0, 1, 0]


def test_a_document_is_held_in_part() -> None:
    """A pool of 4 for two documents of 3: one whole and the head of the other, if it may choose."""
    optimum = passes("abc", "xyz", times=3)
    assert optimum.hits(4) == [0, 0, 3, 1, 3, 1]
    assert optimum.hits(4, bypass=False) == [0, 0, 1, 1, 1, 1]


def test_a_document_asked_once_displaces_nothing_with_bypass() -> None:
    optimum = OfflineOptimum([chain_of(document) for document in ("ab", "xyz", "ab")])
    assert optimum.hits(3) == [0, 0, 2]
    assert optimum.hits(3, bypass=False) == [0, 0, 0]
    assert optimum.hits(4, bypass=False) == [0, 0, 1]


@pytest.mark.parametrize("bypass", [True, False])
def test_what_is_shared_is_hit_by_all_even_if_longer_than_the_pool(bypass: bool) -> None:
    chains = [chain_of("abcd" + own) for own in "xyz"]
    assert OfflineOptimum(chains).hits(2, bypass=bypass) == [0, 2, 2]
    assert OfflineOptimum(chains).hits(1000, bypass=bypass) == [0, 4, 4]


def test_nothing_to_hit() -> None:
    assert OfflineOptimum([]).hits(1) == []
    assert OfflineOptimum([(), "ab", ()]).hits(1, bypass=False) == [0, 0, 0]


@pytest.mark.parametrize(
    ("chains", "message"),
    [
        (["ab", "b"], "request 1, position 0: 'b' follows nothing, but 'a' before;"),
        (["ab", "cb"], "request 1, position 1: 'b' follows 'c', but 'a' before;"),
        (["aa"], "request 0, position 1: 'a' follows 'a', but nothing before;"),
    ],
)
def test_ids_that_do_not_stand_for_prefixes(chains: list[str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        OfflineOptimum(chains)


@pytest.mark.parametrize("capacity", [0, -1])
def test_a_capacity_that_is_none(capacity: int) -> None:
    with pytest.raises(ValueError, match=f"capacity_blocks={capacity}: must be at least 1"):
        OfflineOptimum(["a"]).hits(capacity)
