"""Random fleets: nobody reads wrong bytes, waits for ever or keeps anything, whatever the network does."""

from collections import Counter

from offload.testing.virtual.run import FLEET, run_seed
from tests.seeds import OTHER_SEEDS

TURNS = 150
SEEDS = 8


def test_random_fleets() -> None:
    counts: Counter[str] = Counter()
    for seed in range(OTHER_SEEDS, OTHER_SEEDS + SEEDS):
        counts += run_seed(seed, TURNS, kind=FLEET).counts
    if OTHER_SEEDS == 0:
        assert counts["handed off"] > 20 and counts["bytes"] > 50_000, f"too little has happened: {counts}"
