"""What is easy to get wrong in a tier, each with a test, and each put wrong on purpose."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from offload.messages import Extents, TierFacts
from offload.scheduler.tiers import directory
from offload.scheduler.tiers.cold_end import ColdEnd
from offload.scheduler.tiers.directory import Directory, Reading
from offload.scheduler.tiers.fetches import Fetches
from offload.scheduler.tiers.named_places import NamedPlaces, as_row
from offload.scheduler.tiers.recovery import Agreed
from offload.scheduler.tiers.recovery import agree as agree_all
from offload.scheduler.tiers.spills import Spills
from offload.scheduler.weights import Weights
from offload.settings import Admit
from offload.testing.media.faulty import MediumFault
from offload.testing.media.memory import MemoryMedium
from offload.worker.media.base import Verb
from offload.worker.replicas import Share
from tests.seeds import OTHER_SEEDS
from tests.virtual import test_tiers
from tests.virtual.driver import come_to_rest, forget_gpu, step_until, tokens, watch
from tests.virtual.test_tiers import BLOCK, LIMITS, POSITIONS, PROMPT, SLOTS, WHOLE, Tiered, random_history

REST = len(PROMPT) - WHOLE
EXTENT = POSITIONS * BLOCK
"""Tokens of one."""


def leave_in_pool(tiered: Tiered, num_positions: int) -> None:
    """The pool evicts all others, from the ends of chains, and the GPU forgets everything."""
    forget_gpu(tiered.engine)
    allocator = tiered.engine.side.allocator
    allocator.evict(allocator.num_resident - num_positions)
    assert allocator.num_resident == num_positions


def let_go(tiered: Tiered) -> None:
    tiered.tier.choose = None
    for medium in tiered.tier.media:
        medium.let_go()


def end(tiered: Tiered) -> None:
    let_go(tiered)
    come_to_rest(tiered.engine)
    tiered.engine.close()


# Tests


@pytest.mark.parametrize("verify", ["always", "never"])
def test_whatever_is_verified_above_what_comes_from_below_is(verify: str) -> None:
    tiered = Tiered(verify_loads=verify)
    tiered.ask()
    tiered.evict()
    for kept in tiered.tier.media[0].inner.kept.values():  # type: ignore[attr-defined]
        kept.content[1] ^= 1
    assert tiered.ask() == len(PROMPT)
    end(tiered)


def test_a_record_without_its_bytes_is_a_miss() -> None:
    """The machine stopped when its log was on the device, and the slab was not."""
    tiered = Tiered(2, verify_loads="never")
    tiered.ask()
    for kept in tiered.tier.media[1].inner.kept.values():  # type: ignore[attr-defined]
        kept.content[:] = bytes(len(kept.content))
    tiered.restart()
    assert tiered.ask() == len(PROMPT)
    tiered.evict()
    assert tiered.ask() == REST, "it was written again"
    end(tiered)


def test_a_full_tier_takes_new_ones_after_a_restart() -> None:
    tiered = Tiered(num_places=20, limits=LIMITS._replace(admit=Admit.ALL, bytes_per_day=1e12))
    for first in range(4):
        tiered.ask(tokens(63 * BLOCK + 2, first=first))
    tiered.restart()
    other = tokens(63 * BLOCK + 2, first=20)
    tiered.ask(other)
    assert not tiered.tier.spills.breaker.is_outage
    leave_in_pool(tiered, 0)
    assert tiered.ask(other) == REST
    end(tiered)


@pytest.mark.parametrize("index", [0, 7])
def test_what_follows_what_a_rank_has_lost_is_gone(index: int) -> None:
    tiered = Tiered(3)
    tiered.ask()
    kept = tiered.tier.media[1].inner.kept  # type: ignore[attr-defined]
    del kept[sorted(kept, key=lambda place: kept[place].generation)[index]]
    tiered.restart()
    num_lost = 15 - index
    assert tiered.ask() == REST + num_lost * EXTENT
    assert tiered.tier.spills._directory.num_used == 15
    tiered.restart()
    assert tiered.ask() == REST
    end(tiered)


def test_slots_that_are_spilled_stay() -> None:
    """What hangs on its way down is good when it goes on, whatever the pool has evicted meanwhile."""
    tiered = Tiered()
    tiered.fault(Verb.PUT, MediumFault.STUCK)
    request = tiered.engine.add(PROMPT, 1)
    step_until(tiered.engine, lambda: request.is_finished() and bool(tiered.tier.media[0]._stuck), 100)
    tiered.tier.choose = None
    forget_gpu(tiered.engine)
    for first in (7, 8):  # a pool of 96 slots, of which what is being spilled holds some
        other = tiered.engine.add(tokens(30 * BLOCK, first=first), 1)
        step_until(tiered.engine, other.is_finished)
    let_go(tiered)
    tiered.engine.drain(1000)
    num_below = tiered.tier.spills._directory.depth(tiered.tier.spills._grid.names(request.block_hashes))
    assert num_below >= 4, f"{num_below} extents have come below"
    end(tiered)


def test_places_that_are_read_stay() -> None:
    """What hangs on its way up is good when it goes on, whatever was written meanwhile."""
    limits = LIMITS._replace(policy="lru", admit=Admit.ALL, bytes_per_day=1e12)
    tiered = Tiered(num_places=15, limits=limits)
    tiered.ask()
    leave_in_pool(tiered, 0)
    tiered.fault(Verb.GET, MediumFault.STUCK)
    computed = watch(tiered.engine)
    request = tiered.engine.add(PROMPT, 1)
    tiered.engine.step()
    assert tiered.tier.media[0].is_stuck
    for first in (7, 8):
        other = tiered.engine.add(tokens(30 * BLOCK, first=first), 1)
        step_until(tiered.engine, other.is_finished, 20)
    step_until(tiered.engine, lambda: not tiered.tier.spills._chains, 20)
    let_go(tiered)
    step_until(tiered.engine, request.is_finished, 100)
    assert computed[request.request_id] == len(PROMPT) - SLOTS // 4 * BLOCK, "a quarter of the pool"
    end(tiered)


def test_what_was_not_written_is_not_known() -> None:
    tiered = Tiered(2)
    tiered.fault(Verb.PUT, MediumFault.FAIL)
    tiered.ask()
    assert tiered.tier.media[0].inner.kept and not tiered.tier.spills._directory.num_used  # type: ignore[attr-defined]
    end(tiered)


@pytest.mark.parametrize("num_positions", [1, 10, 13])
def test_what_the_pool_has_of_an_extent_is_left_out(num_positions: int) -> None:
    tiered = Tiered(2)
    tiered.ask()
    leave_in_pool(tiered, num_positions)
    assert tiered.ask() == REST
    end(tiered)


# Each of these is caught

Patch = pytest.MonkeyPatch


def nothing_is_checked(patch: Patch) -> None:
    patch.setattr(MemoryMedium, "_check", lambda *_: None)


def epochs_stay(patch: Patch) -> None:
    original = Directory.extents

    def extents(self: Directory, *arguments: Any) -> Extents:
        self.epoch = 1
        return original(self, *arguments)

    patch.setattr(Directory, "extents", extents)


def parents_are_not_looked_at(patch: Patch) -> None:
    original = directory.chains

    def chains(agreed: Agreed) -> Any:
        """As if what is missing had been there: what comes behind a hole begins a chain."""
        known = {row.tobytes() for row in agreed.names}
        parents = np.array(
            [row if row.tobytes() in known else np.zeros_like(row) for row in agreed.parents], dtype=np.uint8
        )
        return original(agreed._replace(parents=parents.reshape(agreed.parents.shape)))

    patch.setattr(directory, "chains", chains)


def a_reset_forgets_the_tier(patch: Patch) -> None:
    patch.setattr(Directory, "reset", lambda self: None)


def one_ranks_word_counts(patch: Patch) -> None:
    def agree(facts: Sequence[TierFacts], *sizes: int) -> Agreed:
        return agree_all([replace_part(facts[0])], *sizes)

    def replace_part(fact: TierFacts) -> TierFacts:
        return fact._replace(part=Share().part, num_parts=Share().num_parts)

    patch.setattr(directory, "agree", agree)


def what_failed_is_kept(patch: Patch) -> None:
    patch.setattr(Directory, "drop", lambda *_: None)


def slots_are_not_pinned(patch: Patch) -> None:
    original, advance = Spills._begin, Spills.advance

    def begin(self: Spills, chain: Any) -> Any:
        order = original(self, chain)
        for job in self._common.ledger.of(self):
            if job.task.pin in self._common.allocator._pins:
                self._common.allocator.unpin(job.task.pin)
        return order

    def unpinned(self: Spills, job: Any, progress: Any) -> None:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(self._common.allocator, "unpin", lambda pin: None, raising=False)
            advance(self, job, progress)

    patch.setattr(Spills, "_begin", begin)
    patch.setattr(Spills, "advance", unpinned)


def places_are_not_pinned(patch: Patch) -> None:
    original = Directory.read

    def read(self: Directory, *arguments: Any) -> Reading:
        reading = original(self, *arguments)
        reading.life.unpin(reading.pin)
        return reading

    patch.setattr(Directory, "read", read)
    patch.setattr(Directory, "end_read", lambda *_: None)


def nothing_is_private(patch: Patch) -> None:
    original = Directory.extents
    patch.setattr(Directory, "extents", lambda *arguments: original(*arguments)._replace(suffix=b""))


def names_are_not_looked_at(patch: Patch) -> None:
    """Whatever name weights have, they find what others have written under one."""
    original = NamedPlaces.of

    def of(self: NamedPlaces, suffix: bytes, generations: Any) -> Agreed:
        if self._suffixes is not None:
            self._suffixes[self._suffixes.any(axis=1)] = as_row(suffix)
        return original(self, suffix, generations)

    patch.setattr(NamedPlaces, "of", of)


def a_name_outlives_a_reset(patch: Patch) -> None:
    original = Weights.reset

    def reset(self: Weights, num_cached: int) -> None:
        version = self._version
        original(self, num_cached)
        self._version, self._is_new = version, version is not None

    patch.setattr(Weights, "reset", reset)


def plain_is_a_name(patch: Patch) -> None:
    """What has a name is served to an engine that has just begun."""
    patch.setattr(Agreed, "rows", lambda self, which: self)


def the_cold_end_is_not_looked_at(patch: Patch) -> None:
    patch.setattr(ColdEnd, "due", lambda self: [])


def the_cold_end_is_written_at_once(patch: Patch) -> None:
    patch.setattr(ColdEnd, "due", ColdEnd.take)


def a_shutdown_forgets_what_waits(patch: Patch) -> None:
    patch.setattr(ColdEnd, "take", lambda self: self.clear() or [])


def a_shutdown_never_ends(patch: Patch) -> None:
    original = Spills.ending

    def ending(self: Spills) -> None:
        original(self)
        self._busy_until = float("inf")

    patch.setattr(Spills, "ending", ending)


def skips_are_ignored(patch: Patch) -> None:
    def extents(self: Reading, starts: Any, skips: Any) -> Extents:
        return Extents(self.places, self.generations, starts, np.zeros_like(skips))

    patch.setattr(Reading, "extents", extents)


def a_short_fetch_is_committed(patch: Patch) -> None:
    original = Fetches._end

    def over(self: Fetches, job: Any) -> None:
        job.num_good = job.num_blocks
        original(self, job)

    patch.setattr(Fetches, "_end", over)
    patch.setattr(Fetches, "_give_up", lambda self, fetch: None)


def a_failed_spill_is_committed(patch: Patch) -> None:
    original = Directory.end_write
    patch.setattr(
        Directory, "end_write", lambda self, writing, *, is_good: original(self, writing, is_good=True)
    )


def histories() -> None:
    for seed in range(60):
        random_history(seed)


def a_short_fetch() -> None:
    """What it has not brought is not in the pool."""
    tiered = Tiered(1)
    tiered.ask()
    tiered.evict()
    tiered.fault(Verb.GET, MediumFault.SHORT)
    tiered.engine.add(PROMPT, 1)
    for _ in range(10):
        tiered.engine.step()
        tiered.engine.audit.check_pool()
    end(tiered)


def with_tier(test: Callable[..., None], num_ranks: int, *more: Any) -> Callable[[], None]:
    return lambda: test(Tiered(num_ranks), *more)


named_weights = with_tier(test_tiers.test_weights_with_a_name_find_what_they_have_written, 1)


def full_tier() -> None:
    test_tiers.test_a_full_tier_takes_what_the_pool_is_about_to_evict(Admit.POLICY)


@dataclass(frozen=True)
class Mutant:
    """``apply`` puts it wrong, and ``caught_by`` says so."""

    apply: Callable[[Patch], None]
    caught_by: Callable[[], None]


MUTANTS = [
    Mutant(nothing_is_checked, lambda: test_whatever_is_verified_above_what_comes_from_below_is("never")),
    Mutant(nothing_is_checked, test_a_record_without_its_bytes_is_a_miss),
    Mutant(epochs_stay, test_a_full_tier_takes_new_ones_after_a_restart),
    Mutant(parents_are_not_looked_at, lambda: test_what_follows_what_a_rank_has_lost_is_gone(7)),
    Mutant(
        a_reset_forgets_the_tier,
        with_tier(test_tiers.test_after_a_reset_nothing_comes_back_until_a_restart, 1),
    ),
    Mutant(a_reset_forgets_the_tier, histories),
    Mutant(one_ranks_word_counts, test_tiers.test_a_rank_that_lost_its_part_is_found_at_a_restart),
    Mutant(what_failed_is_kept, with_tier(test_tiers.test_a_byte_that_changed_below_is_found, 1)),
    Mutant(slots_are_not_pinned, test_slots_that_are_spilled_stay),
    Mutant(places_are_not_pinned, test_places_that_are_read_stay),
    Mutant(
        nothing_is_private, with_tier(test_tiers.test_after_a_reset_nothing_comes_back_until_a_restart, 1)
    ),
    Mutant(names_are_not_looked_at, named_weights),
    Mutant(a_name_outlives_a_reset, with_tier(test_tiers.test_a_name_is_of_one_reset, 1)),
    Mutant(plain_is_a_name, named_weights),
    Mutant(the_cold_end_is_not_looked_at, full_tier),
    Mutant(the_cold_end_is_written_at_once, full_tier),
    Mutant(a_shutdown_forgets_what_waits, test_tiers.test_a_shutdown_writes_what_waits),
    Mutant(a_shutdown_never_ends, test_tiers.test_a_shutdown_takes_no_longer_than_it_may),
    Mutant(skips_are_ignored, lambda: test_what_the_pool_has_of_an_extent_is_left_out(10)),
    Mutant(skips_are_ignored, histories),
    Mutant(a_short_fetch_is_committed, a_short_fetch),
    Mutant(a_failed_spill_is_committed, test_what_was_not_written_is_not_known),
]


@pytest.mark.skipif(OTHER_SEEDS != 0, reason="how soon a mutant is met is up to the seeds")
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.apply.__name__)
def test_mutant_is_caught(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant.apply(monkeypatch)
    with pytest.raises(AssertionError) as caught:
        mutant.caught_by()
    print(f"{mutant.apply.__name__}: {str(caught.value).splitlines()[-1][:150]}")
