"""What the property tests draw from, and how long they draw."""

import os
from functools import cache

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from allocator import hash_chain

MAX_LENGTH = 9
"""Chain positions in the longest chain drawn."""


def thorough(max_examples: int, steps: int = 50) -> settings:
    """Settings of a test that draws ``max_examples`` times, ``steps`` rules each in a state machine.

    On a continuous-integration machine every run draws the same.
    """
    fixed = bool(os.environ.get("CI"))
    return settings(
        max_examples=max_examples,
        stateful_step_count=steps,
        deadline=None,
        derandomize=fixed,
        database=None if fixed else settings.default.database,
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
