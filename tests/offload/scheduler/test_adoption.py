"""What a later life makes of rows: the chains that were there, and nothing that was not."""

import random
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from allocator import CpuOffloadingBlockAllocator
from offload.messages import EPOCH_SHIFT, Ids, Kept, PoolFacts
from offload.naming import rows
from offload.scheduler.adoption import Adoption, adopt
from offload.scheduler.groups import Group, Groups, Kind
from offload.scheduler.lasting import Lasting
from offload.scheduler.tiers.names import name_of
from tests.seeds import OTHER_SEEDS

PLAIN = Groups([Group(Kind.FULL, 4)], 4)
COLUMNS = Groups([Group(Kind.FULL, 4), Group(Kind.FULL, 2)], 4)
WINDOW = Groups([Group(Kind.FULL, 4), Group(Kind.WINDOW, 4, 10)], 4)
CHUNK = Groups([Group(Kind.FULL, 4), Group(Kind.CHUNK, 4, 16)], 4)
KINDS = {"plain": PLAIN, "columns": COLUMNS, "window": WINDOW, "chunk": CHUNK}
SLOTS = 200


def allocator_of(groups: Groups, order: Ids | None = None) -> CpuOffloadingBlockAllocator:
    return CpuOffloadingBlockAllocator(
        SLOTS, columns=groups.columns, bag_slots=groups.bag_slots, bag_reach=groups.reach + 1, order=order
    )


class Life:
    """An engine's pool, and what its workers were told."""

    def __init__(self, groups: Groups, adoption: Adoption | None = None) -> None:
        self.groups = groups
        self.allocator = allocator_of(groups, None if adoption is None else adoption.order)
        self.epoch = 1 if adoption is None else adoption.epoch
        self.generations = np.full(SLOTS, -1) if adoption is None else adoption.generations.copy()
        self.rows: dict[int, tuple[Any, ...]] = {}
        if adoption is not None:
            adoption.into(self.allocator)
        self.allocator.check_invariants()
        self._lasting = Lasting()
        self._job = 0

    def store(self, chain: Sequence[bytes], stop: int, *, is_good: bool = True) -> None:
        num_bag = self.groups.num_in_bag(stop) if self.groups.has_bags else None
        plan = self.allocator.plan_store(chain, stop, num_bag=num_bag)
        if plan is None:
            return
        self._job += 1
        slots = plan.all_slots
        self.generations[slots] = self.epoch << EPOCH_SHIFT | self._job
        for slot in slots.tolist():
            self.rows.pop(slot, None)
        if is_good and self.allocator.commit(plan):
            self._lasting.committed(plan, self.generations[slots])
        elif not is_good:
            self.allocator.abort(plan)
        for kept in self._lasting.take():
            for row in zip(*kept, strict=True):
                self.rows[int(row[0])] = row

    def facts(self, lost: set[int] = frozenset(), epoch: int | None = None) -> PoolFacts:  # type: ignore[assignment]
        """As a worker finds it that has lost those slots."""
        kept = [self.rows[slot] for slot in sorted(self.rows) if slot not in lost]
        if not kept:
            none, nothing = np.zeros(0, dtype=np.int64), rows([])
            return PoolFacts(self.epoch + 1, Kept(none, none, nothing, nothing, none))
        found = Kept(*(np.array(column) for column in zip(*kept, strict=True)))
        return PoolFacts(self.epoch + 1 if epoch is None else epoch, found)


def chain_of(name: str, length: int) -> list[bytes]:
    """Prefix hashes of a chain in which each letter of ``name`` is so many positions."""
    return [f"{name[: index // 4 + 1]}{index}".encode().ljust(16, b".") for index in range(length)]


def resident(life: Life, chain: Sequence[bytes]) -> list[int]:
    """Generations of the resident slots of a chain."""
    generations: list[int] = life.generations[life.allocator.lookup(chain).slots.reshape(-1)].tolist()
    return generations


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_chains_are_there_again(kind: str, num_ranks: int) -> None:
    """Whatever was stored, evicted and stored again: at least what was resident is, from the same slots."""
    groups = KINDS[kind]
    for seed in range(OTHER_SEEDS, OTHER_SEEDS + 20):
        rng = random.Random(seed)
        life = Life(groups)
        for _ in range(3):
            chains = [
                chain_of("".join(rng.choice("abc") for _ in range(4)), rng.randint(1, 16)) for _ in range(30)
            ]
            for chain in chains:
                life.store(chain, rng.randint(1, len(chain)), is_good=rng.random() < 0.9)
            facts = [life.facts() for _ in range(num_ranks)]
            adoption = adopt(facts, SLOTS, groups)
            after = Life(groups, adoption)
            for chain in chains:
                depth = life.allocator.usable_depth(chain, len(chain))
                assert after.allocator.usable_depth(chain, len(chain)) >= depth
                before = resident(life, chain[:depth])
                assert len(resident(after, chain)) >= len(before)
            for chain in chains:
                for slot in after.allocator.lookup(chain).slots.reshape(-1).tolist():
                    assert life.generations[slot] == after.generations[slot] >= 0
            after.rows = {slot: row for slot, row in life.rows.items() if after.generations[slot] >= 0}
            life = after


def test_the_oldest_is_evicted_first() -> None:
    life = Life(PLAIN)
    for name in "abcd":
        life.store(chain_of(name, 4), 4)
    after = Life(PLAIN, adopt([life.facts()], SLOTS, PLAIN))
    after.allocator.evict(12)
    assert [after.allocator.resident_depth(chain_of(name, 4)) for name in "abcd"] == [0, 0, 0, 4]


@pytest.mark.parametrize("num_lost", [1, 5])
def test_what_a_rank_lost_is_gone_with_what_follows_it(num_lost: int) -> None:
    life = Life(PLAIN)
    chain = chain_of("aaaa", 16)
    life.store(chain, 16)
    lost = set(life.allocator.lookup(chain).slots[6 : 6 + num_lost, 0].tolist())
    adoption = adopt([life.facts(), life.facts(lost), life.facts()], SLOTS, PLAIN)
    assert Life(PLAIN, adoption).allocator.resident_depth(chain) == 6
    assert adoption.num_slots == 6


def test_the_highest_epoch_counts() -> None:
    life = Life(PLAIN)
    life.store(chain_of("a", 4), 4)
    assert adopt([life.facts(epoch=4), life.facts(epoch=9), life.facts(epoch=2)], SLOTS, PLAIN).epoch == 9


def test_ranks_with_other_generations_agree_on_nothing() -> None:
    life = Life(PLAIN)
    life.store(chain_of("a", 4), 4)
    other = life.facts()
    other = other._replace(kept=other.kept._replace(generations=other.kept.generations + 1))
    assert adopt([life.facts(), other], SLOTS, PLAIN).num_slots == 0


def test_a_smaller_pool_takes_what_fits() -> None:
    life = Life(PLAIN)
    life.store(chain_of("aaaa", 16), 16)
    adoption = adopt([life.facts()], 10, PLAIN)
    assert adoption.num_slots == 10 and sorted(adoption.order.tolist()) == list(range(10))


def test_positions_that_lead_in_a_circle_are_of_no_chain() -> None:
    names = [name_of(bytes([each]) * 16) for each in (1, 2, 3, 4)]
    parents = [names[1], names[2], names[0], names[0]]
    kept = Kept(np.arange(4), np.arange(1, 5), rows(names), rows(parents), np.full(4, 16 << 32))
    assert adopt([PoolFacts(1, kept)], SLOTS, PLAIN).num_slots == 0


def test_an_empty_pool() -> None:
    adoption = adopt([Life(PLAIN).facts()], SLOTS, PLAIN)
    assert adoption.num_slots == 0 and adoption.order.tolist() == list(range(SLOTS))


def test_many_branches_of_a_long_chain() -> None:
    groups, life = PLAIN, Life(PLAIN)
    trunk = chain_of("aaaaaaaaaa", 40)
    for number in range(40):
        branch = [*trunk[: number + 1], f"branch {number}".encode().ljust(16)]
        life.store(branch, len(branch))
    after = Life(groups, adopt([life.facts()], SLOTS, groups))
    for number in range(40):
        branch = [*trunk[: number + 1], f"branch {number}".encode().ljust(16)]
        assert after.allocator.resident_depth(branch) == number + 2


def test_after_a_reset_nothing_is_told() -> None:
    life = Life(PLAIN)
    life.store(chain_of("a", 4), 2)
    life._lasting.reset()
    life.store(chain_of("a", 4), 4)
    assert len(life.rows) == 2
