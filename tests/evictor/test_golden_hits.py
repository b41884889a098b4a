"""Golden hit counts on small traces, and the same from simulations of single blocks.

A trace is a string: each letter is a request, and says which document it asks about. The letter's
chain is a system prompt of two positions that all share, the document, and one position per earlier
request for the same letter, as a conversation grows. Of a digit it is the same each time.
"""

from collections import Counter
from collections.abc import Iterator

import pytest

from allocator import CpuOffloadingBlockAllocator, serve
from evictor import available_policies, make_policy
from tests.evictor.by_blocks import MODELS
from tests.strategies import chain_of

TRACES = {
    "conversations": "abacabadabacbdaceaafabgaebachaabdbicbajaacbeaddbakaclbcaabmbdanbeab",
    "cycle": "abcdefgh" * 6,
    "hot and cold": "aXbYaZbWaVbUaTbSaRbQaPbOaNbMaLbKaJbIaHbG",
    "the same again": "12123145161261731281932114512617213124",
}
CAPACITIES = (8, 16, 32, 64)

GOLDEN: dict[str, dict[str, tuple[int, ...]]] = {
    "arc": {
        "conversations": (176, 293, 479, 729),
        "cycle": (94, 94, 120, 319),
        "hot and cold": (78, 103, 227, 231),
        "the same again": (92, 162, 174, 193),
    },
    "fifo": {
        "conversations": (176, 289, 448, 723),
        "cycle": (94, 94, 96, 287),
        "hot and cold": (78, 81, 221, 231),
        "the same again": (87, 131, 167, 193),
    },
    "hazard": {
        "conversations": (201, 290, 483, 720),
        "cycle": (94, 94, 151, 336),
        "hot and cold": (78, 162, 231, 231),
        "the same again": (87, 147, 180, 193),
    },
    "lfu": {
        "conversations": (176, 306, 533, 724),
        "cycle": (94, 94, 104, 327),
        "hot and cold": (78, 102, 224, 231),
        "the same again": (96, 164, 180, 193),
    },
    "lru": {
        "conversations": (176, 289, 448, 723),
        "cycle": (94, 94, 96, 287),
        "hot and cold": (78, 81, 221, 231),
        "the same again": (87, 142, 177, 193),
    },
    "s3fifo": {
        "conversations": (176, 307, 515, 722),
        "cycle": (94, 94, 167, 317),
        "hot and cold": (78, 134, 226, 231),
        "the same again": (95, 159, 174, 193),
    },
}
"""Positions served from the pool, by policy and trace, for each of CAPACITIES."""


def chains(trace: str) -> Iterator[list[bytes]]:
    turns: Counter[str] = Counter()
    for letter in trace:
        document = ord(letter)
        length = 3 + document % 3
        yield chain_of(0, 1, *[document] * length, *range(turns[letter]))
        turns[letter] += not letter.isdigit()


def hits(policy: str, trace: str, capacity: int, limit: int | None = None) -> int:
    """Each request is looked up, computed and stored, ``limit`` positions at a time, before the next one."""
    allocator = CpuOffloadingBlockAllocator(capacity, policy=make_policy(policy, capacity))
    total = 0
    for chain in chains(trace):
        total += serve(allocator, chain, limit=limit).depth
        allocator.check_invariants()
    return total


def lru_hits_by_blocks(trace: str, capacity: int) -> int:
    """LRU over single blocks: whoever uses a block uses those before it, so tails are older."""
    last_use: dict[bytes, tuple[int, int]] = {}
    total = 0
    for now, chain in enumerate(chains(trace)):
        depth = next((depth for depth, each in enumerate(chain) if each not in last_use), len(chain))
        total += depth
        last_use.update({each: (now, -position) for position, each in enumerate(chain[:depth])})
        for position, each in enumerate(chain[depth:], depth):
            if len(last_use) == capacity:
                victim = min(last_use, key=last_use.__getitem__)
                if victim in chain:
                    break  # its own prefix is no room for the rest of it
                del last_use[victim]
            last_use[each] = now, -position
    return total


@pytest.mark.parametrize("trace", TRACES)
@pytest.mark.parametrize("policy", available_policies())
def test_golden_hits(policy: str, trace: str) -> None:
    assert tuple(hits(policy, TRACES[trace], capacity) for capacity in CAPACITIES) == GOLDEN[policy][trace]


@pytest.mark.parametrize("trace", TRACES)
def test_lru_hits_are_those_of_lru_over_single_blocks(trace: str) -> None:
    for capacity in CAPACITIES:
        assert hits("lru", TRACES[trace], capacity) == lru_hits_by_blocks(TRACES[trace], capacity)


@pytest.mark.parametrize("trace", TRACES)
@pytest.mark.parametrize("policy", MODELS)
def test_hits_are_those_of_the_policy_over_single_blocks(policy: str, trace: str) -> None:
    """Stored one by one: a run that is evicted in one bite is one decision, for a model it is several."""
    for capacity in CAPACITIES:
        model = MODELS[policy](capacity)
        expected = sum(model.request(chain) for chain in chains(TRACES[trace]))
        assert hits(policy, TRACES[trace], capacity, limit=1) == expected, f"capacity {capacity}"
