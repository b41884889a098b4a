"""Chains that fork, and a pool that holds some of them."""

from tests.allocator.pair import LruPair
from tests.strategies import chain_of

LONG = chain_of(0, 0, 0, 0, 0, 0)
FORK = chain_of(0, 0, 0, 1, 1)
"""Leaves LONG after three positions."""
OTHER = chain_of(1, 1, 1, 1)
"""Shares nothing with LONG."""


def pair_with(*chains: list[bytes], capacity: int = 16) -> LruPair:
    """An allocator that stored ``chains`` in that order, with its model."""
    pair = LruPair(capacity)
    for chain in chains:
        pair.store(chain)
    pair.check()
    return pair
