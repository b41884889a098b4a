"""What the property tests draw from, and how long they draw."""

from functools import cache

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from allocator import hash_chain
from tests.seeds import OTHER_SEEDS

MAX_LENGTH = 9
"""Chain positions in the longest chain drawn."""


def thorough(max_examples: int, steps: int = 50) -> settings:
    """Settings of a test that draws ``max_examples`` times, ``steps`` rules each in a state machine.

    Every run draws the same, on every machine, unless it is given other seeds (see ``tests.seeds``).
    """
    return settings(
        max_examples=max_examples,
        stateful_step_count=steps,
        deadline=None,
        derandomize=not OTHER_SEEDS,
        database=None,
        print_blob=True,
        suppress_health_check=[HealthCheck.too_slow],
    )


@cache
def chain_of(*token_ids: int) -> list[bytes]:
    """The prefix hashes of blocks of a single token: each token is a chain position. Do not mutate."""
    return hash_chain(token_ids, 1)


def chains(min_length: int = 1, max_length: int = MAX_LENGTH) -> st.SearchStrategy[list[bytes]]:
    """Chains over an alphabet so small, and so uneven, that nearly all of them share prefixes."""
    tokens = st.lists(st.sampled_from([0, 0, 0, 1]), min_size=min_length, max_size=max_length)
    return tokens.map(lambda drawn: chain_of(*drawn))


def depths(max_depth: int = MAX_LENGTH) -> st.SearchStrategy[int]:
    """A number of leading chain positions; to be clipped to the chain's length."""
    return st.integers(0, max_depth)
