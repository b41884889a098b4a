"""The list of uncached blocks, asked after any history of stores, evictions and resets."""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from allocator import CpuOffloadingBlockAllocator, UncachedRun
from tests.allocator.pair import LruPair
from tests.strategies import chain_of, chains, depths, thorough

OWNERS = st.sampled_from(["one", "two", "three"])


class UncachedMachine(RuleBasedStateMachine):
    @initialize()
    def make(self) -> None:
        self.pair = LruPair(8)
        self.full: dict[str, tuple[list[bytes], int]] = {}

    @rule(owner=OWNERS, chain=chains(), num_full=depths())
    def note_full(self, owner: str, chain: list[bytes], num_full: int) -> None:
        self.full[owner] = chain, min(num_full, len(chain))
        self.pair.allocator.note_full(owner, chain, min(num_full, len(chain)))

    @rule(owner=OWNERS)
    def forget_owner(self, owner: str) -> None:
        self.full.pop(owner, None)
        self.pair.allocator.forget_owner(owner)

    @rule(chain=chains(), commit=st.booleans())
    def store(self, chain: list[bytes], commit: bool) -> None:
        """What is filling has a copy on its way."""
        plan = self.pair.plan_store(chain)
        if commit and plan is not None:
            self.pair.commit(plan)

    @rule(num_slots=st.integers(0, 4))
    def evict(self, num_slots: int) -> None:
        self.pair.evict(num_slots)

    @rule(really=st.integers(0, 3))
    def reset(self, really: int) -> None:
        if really == 3:
            self.pair.reset()
            self.full.clear()

    @rule()
    def uncached(self) -> None:
        """By definition, deepest shared prefix first; who has none is not asked again."""
        runs = [
            UncachedRun(owner, chain, len(self.pair.model.tree.known(chain[:stop])), stop)
            for owner, (chain, stop) in self.full.items()
        ]
        runs = [run for run in runs if run.start < run.stop]
        assert self.pair.allocator.uncached() == sorted(runs, key=lambda run: -run.start)
        self.full = {run.owner: self.full[run.owner] for run in runs}

    @invariant()
    def agrees(self) -> None:
        self.pair.check()


TestUncachedMachine = UncachedMachine.TestCase
TestUncachedMachine.settings = thorough(100)


def test_what_is_evicted_is_uncached_again() -> None:
    """Nothing remembers that it was stored once: where the copy begins is asked each time."""
    allocator = CpuOffloadingBlockAllocator(4)
    chain = chain_of(0, 0, 0, 0, 0, 0)
    allocator.note_full("request", chain, 6)
    plan = allocator.plan_store(chain, 4)
    assert plan is not None
    allocator.commit(plan)
    assert allocator.uncached() == [UncachedRun("request", chain, 4, 6)]
    allocator.evict(3)
    assert allocator.uncached() == [UncachedRun("request", chain, 1, 6)]


def test_who_shares_more_with_the_pool_comes_first() -> None:
    allocator = CpuOffloadingBlockAllocator(8)
    for owner, chain in {"new": chain_of(1, 1), "old": chain_of(0, 0, 0), "older": chain_of(0, 0, 1)}.items():
        allocator.note_full(owner, chain, len(chain))
    plan = allocator.plan_store(chain_of(0, 0), 2)
    assert plan is not None
    assert [(run.owner, run.start) for run in allocator.uncached()] == [("old", 2), ("older", 2), ("new", 0)]
