"""A fresh pool that adopts chains is as one that has stored them, and nothing else."""

import random

import pytest

from allocator import CpuOffloadingBlockAllocator
from evictor import make_policy
from tests.seeds import OTHER_SEEDS


def made(policy: str) -> CpuOffloadingBlockAllocator:
    return CpuOffloadingBlockAllocator(
        400, columns=2, policy=make_policy(policy, 400, lambda: 0.0), record_events=True
    )


@pytest.mark.parametrize("policy", ["lru", "hazard", "s3fifo"])
def test_it_is_as_if_they_had_been_stored(policy: str) -> None:
    for seed in range(OTHER_SEEDS, OTHER_SEEDS + 10):
        rng = random.Random(seed)
        stored, adopted = made(policy), made(policy)
        chains = []
        for _ in range(20):
            letters = "".join(rng.choice("ab") for _ in range(3)) * rng.randint(1, 5)
            chains.append([f"{letters[: index + 1]:.<16}".encode() for index in range(len(letters))])
        for chain in chains:
            plan = stored.plan_store(chain, len(chain))
            slots = adopted.adopting.adopt(chain)
            assert slots.tolist() == ([] if plan is None else plan.slots.tolist())
            if plan is not None:
                assert stored.commit(plan)
            adopted.check_invariants()
        assert adopted.take_events() == stored.take_events()
        assert adopted.num_resident == stored.num_resident > 0 and adopted.num_filling == 0
        while stored.num_resident:
            assert adopted.evict(1) == stored.evict(1) > 0
            assert adopted.take_events() == stored.take_events()
