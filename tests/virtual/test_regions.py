"""A pool that outlives its engine, in real shared memory: the next engine serves from it."""

import random
from collections.abc import Iterator
from typing import Any

import pytest

from offload.messages import LOAD, STORE
from offload.scheduler.tiers.tier import TierLimits
from offload.testing.copiers.faulty import Fault
from offload.testing.virtual import MODELS, VirtualEngine, VirtualSettings
from offload.testing.virtual.audit import Audit
from offload.testing.virtual.region import VirtualRegion
from offload.testing.virtual.tier import VirtualTier
from tests.virtual.driver import come_to_rest, finish, forget_gpu, hold, release, serve, tokens, watch

BLOCK = 4
SLOTS = 96
PROMPT = tokens(63 * BLOCK + 2)
OTHER = tokens(20 * BLOCK + 2, first=3)
WHOLE = 63 * BLOCK
"""Tokens of its blocks."""


class Lives:
    """Engines over one region, one after the other."""

    def __init__(self, num_ranks: int = 1, **settings: Any) -> None:
        self.region = VirtualRegion()
        self.settings = {"cpu_slots": SLOTS, "gpu_blocks": 140, "num_ranks": num_ranks, **settings}
        self.start()

    def start(self) -> None:
        self.engine = VirtualEngine(VirtualSettings(region=self.region, **self.settings), random.Random(0))

    def restart(self) -> None:
        """The engine ends as if it were killed, and another begins."""
        self.engine.close()
        self.start()

    def ask(self, prompt: list[int] = PROMPT, **options: Any) -> int:
        """Tokens that are computed for the prompt."""
        computed = watch(self.engine)
        return computed[serve(self.engine, prompt, **options).request_id]

    def end(self) -> None:
        release(self.engine)
        come_to_rest(self.engine)
        self.engine.close()
        self.region.close()


def check_pool(engine: VirtualEngine) -> None:
    """Every resident slot holds what its hash says."""
    assert isinstance(engine.audit, Audit)
    engine.audit.check_pool()


@pytest.fixture(params=[1, 3], ids=["one rank", "three ranks"])
def lives(request: pytest.FixtureRequest) -> Iterator[Lives]:
    lives = Lives(request.param)
    yield lives
    lives.end()


def test_the_next_engine_serves_from_the_pool(lives: Lives) -> None:
    assert lives.ask() == len(PROMPT)
    lives.restart()
    assert lives.engine.side.allocator.num_resident == WHOLE // BLOCK
    assert lives.ask() == len(PROMPT) - WHOLE


def test_chains_that_part_are_put_together(lives: Lives) -> None:
    lives.ask(PROMPT[: 20 * BLOCK])
    branch = PROMPT[: 10 * BLOCK] + tokens(10 * BLOCK, first=5)
    lives.ask(branch)
    lives.restart()
    assert lives.engine.side.allocator.num_resident == 30
    for prompt in (branch, PROMPT[: 20 * BLOCK]):
        assert lives.ask([*prompt, 1]) == 1
    check_pool(lives.engine)


def test_after_a_reset_nothing_is_kept_until_a_restart(lives: Lives) -> None:
    lives.ask()
    assert lives.engine.reset()
    assert lives.ask(OTHER) == len(OTHER)
    lives.restart()
    assert lives.ask(OTHER) == len(OTHER), "what was computed with other weights is of no use"
    assert lives.ask() <= len(PROMPT) - WHOLE + 20 * BLOCK, "it is, but for slots that were used again"


def test_what_is_on_its_way_is_lost(lives: Lives) -> None:
    lives.ask(OTHER)
    hold(lives.engine, STORE)
    finish(lives.engine, PROMPT)
    lives.restart()
    assert lives.ask(OTHER) == 2
    assert lives.ask() == len(PROMPT)


def test_a_store_of_blocks_that_were_no_kv_is_not_found_again(lives: Lives) -> None:
    """Workers have sealed it before the scheduler learns that a load of another request had failed."""
    lives.ask(OTHER)
    engine = lives.engine
    hold(engine, STORE)
    finish(engine, PROMPT)
    engine.side.stores.spoil()
    release(engine)
    engine.drain()
    lives.restart()
    assert lives.ask(OTHER) == 2
    assert lives.ask() == len(PROMPT)
    check_pool(lives.engine)


def test_a_rank_that_lost_its_region_is_found() -> None:
    lives = Lives(3)
    lives.ask()
    side = lives.engine.ranks[1].side
    assert side is not None and side._lasting is not None and side._lasting._region is not None
    path = side._lasting._region.path
    lives.engine.close()
    (path / "pool").unlink()
    lives.start()
    assert lives.engine.side.allocator.num_resident == 0
    assert lives.ask() == len(PROMPT)
    lives.restart()
    assert lives.ask() == len(PROMPT) - WHOLE
    lives.end()


@pytest.mark.parametrize("verify", ["always", "sampled", "never"])
@pytest.mark.parametrize("of_blocks", [True, False])
def test_a_byte_that_changed_meanwhile_is_found(verify: str, of_blocks: bool) -> None:
    lives = Lives(2, verify_loads=verify, seals_of_blocks=of_blocks)
    lives.ask()
    slot = int(lives.engine.side.allocator.lookup(serve(lives.engine, PROMPT).block_hashes).slots[7, 0])
    lives.engine.ranks[1].rot(slot, 3)
    lives.restart()
    assert lives.ask() == len(PROMPT) - 7 * BLOCK
    lives.end()


@pytest.mark.parametrize("model", [name for name in MODELS if name not in ("windows", "states")])
def test_hybrid_models_go_on_at_checkpoints(model: str) -> None:
    settings = VirtualSettings(groups=MODELS[model])
    lives = Lives(2, groups=MODELS[model], gpu_blocks=300, cpu_slots=600, chunk=64)
    prompt = tokens(150)
    assert lives.ask(prompt) == 150
    lives.restart()
    size = settings.block_tokens
    left = 150 % size or size
    assert lives.ask(prompt) == left
    lives.restart()
    assert lives.ask([*prompt, *tokens(20, first=5)]) == left + 20
    lives.end()


def test_ranks_that_share_a_pool_adopt_it_together() -> None:
    lives = Lives(4, replicas=2)
    lives.ask()
    lives.restart()
    assert lives.ask() == len(PROMPT) - WHOLE
    lives.restart()
    check_pool(lives.engine)
    lives.end()


def test_another_size_finds_nothing() -> None:
    lives = Lives()
    lives.ask()
    lives.settings["cpu_slots"] = SLOTS + 1
    lives.restart()
    assert lives.ask() == len(PROMPT)
    assert len(list((lives.region.path / "kv-offload-pool").glob("*.*"))) == 1, "the old one is gone"
    lives.end()


def test_a_full_pool_of_old_slots_takes_new_ones(lives: Lives) -> None:
    for first in range(5):
        lives.ask(tokens(20 * BLOCK, first=first))
    lives.restart()
    for first in range(5, 12):
        lives.ask(tokens(20 * BLOCK, first=first))
        check_pool(lives.engine)
    lives.restart()
    assert lives.engine.side.allocator.num_resident >= 3 * 20
    found = [lives.ask(tokens(20 * BLOCK, first=first)) for first in reversed(range(12))]
    assert sum(each < 20 * BLOCK for each in found) >= 3


def test_failed_loads_of_old_slots_cost_a_miss(lives: Lives) -> None:
    lives.ask()
    lives.restart()
    for copier in lives.engine.copiers:
        copier.force(LOAD, Fault.FAIL)
    assert lives.ask() > 2
    lives.restart()
    assert lives.ask() == 2


def test_a_branch_whose_beginning_was_used_again(lives: Lives) -> None:
    """What the pool evicted is still there for the next engine, but for what has lost its beginning."""
    lives.ask()
    assert lives.engine.reset()
    lives.restart()
    allocator = lives.engine.side.allocator
    chain = serve(lives.engine, PROMPT).block_hashes
    slots = allocator.lookup(chain).slots[:, 0]
    assert len(slots) == WHOLE // BLOCK
    for rank in lives.engine.ranks:
        assert rank.side is not None and rank.side._lasting is not None
        rank.side._lasting._table.seals.fills[slots[5]] = -1
    lives.restart()
    assert lives.engine.side.allocator.num_resident == 5
    assert lives.ask() == len(PROMPT) - 5 * BLOCK


def test_slots_that_are_being_filled_are_not_found(lives: Lives) -> None:
    """Their old rows are of other bytes from the moment on at which a store begins."""
    for first in range(5):
        lives.ask(tokens(19 * BLOCK, first=first))
    hold(lives.engine, STORE)
    finish(lives.engine, PROMPT)
    lives.restart()
    check_pool(lives.engine)
    found = [lives.ask(tokens(19 * BLOCK, first=first)) for first in reversed(range(5))]
    assert any(each > BLOCK for each in found), "the store has taken slots of some of them"


def test_beside_a_tier() -> None:
    """Generations in the pool and below it are apart, and what was fetched is adopted, too."""
    tier = VirtualTier(200, positions=4, limits=TierLimits(least_tokens=2 * BLOCK))
    lives = Lives(2, places=(tier.place,))
    assert lives.ask() == len(PROMPT)
    for first in (7, 8, 9):
        for _ in range(2):
            lives.ask(tokens(63 * BLOCK, first=first))
    forget_gpu(lives.engine)
    assert lives.ask() == len(PROMPT) - 15 * 4 * BLOCK, "whole extents come from the tier"
    chain = serve(lives.engine, PROMPT).block_hashes
    lives.settings["places"] = (tier.place,)
    lives.restart()
    assert lives.engine.side.allocator.resident_depth(chain) == WHOLE // BLOCK
    assert lives.ask() == len(PROMPT) - WHOLE
    check_pool(lives.engine)
    lives.end()
