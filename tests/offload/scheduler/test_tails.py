"""Chains out of rows that know what comes before them, beside a walk from each last row."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from offload.naming import MISSING, NO_PARENT
from offload.scheduler.tails import Tails, tails_of


def walked(parents: list[int]) -> list[list[int]]:
    """The chain to each row that is before no other, in order; none behind a hole or in a circle."""
    chains = []
    for end in range(len(parents)):
        chain, at = [], end
        while at >= 0 and at not in chain:
            chain.append(at)
            at = parents[at]
        if end not in parents and at == NO_PARENT:
            chains.append(chain[::-1])
    return chains


def of(parents: list[int]) -> Tails:
    return tails_of(np.array(parents, dtype=np.int64))


@given(st.integers(0, 30).flatmap(lambda n: st.lists(st.integers(MISSING, n - 1), min_size=n, max_size=n)))
def test_any_rows_make_the_chains_that_a_walk_finds(parents: list[int]) -> None:
    tails = of(parents)
    chains = list(tails.wholes(tails.rows.tolist()))
    assert chains == walked(parents)
    seen: set[int] = set()
    for chain, start, depth in zip(chains, tails.starts.tolist(), tails.depths.tolist(), strict=False):
        assert set(chain[:depth]) <= seen and not seen & set(chain[depth:])
        assert tails.rows[start : start + len(chain) - depth].tolist() == chain[depth:]
        seen |= set(chain)
    assert len(tails.rows) == len(seen)


def test_a_long_chain_in_any_order_is_whole() -> None:
    order = np.random.default_rng(7).permutation(5000)
    parents = np.full(5000, NO_PARENT, dtype=np.int64)
    parents[order[1:]] = order[:-1]
    tails = tails_of(parents)
    assert tails.rows.tolist() == order.tolist() and tails.starts.tolist() == [0, 5000]
