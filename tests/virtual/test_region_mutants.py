"""One thing is taken out of what makes a pool outlive its engine: a test of regions says so."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from offload import naming
from offload.messages import EPOCH_SHIFT, Kept
from offload.scheduler import adoption
from offload.scheduler.lasting import Lasting
from offload.scheduler.stores import Stores
from offload.testing.virtual.run import run_seed
from offload.worker.pool.region import Region
from offload.worker.pool.table import SlotTable
from offload.worker.seals import Seals
from tests.offload.worker.pool import test_table
from tests.seeds import OTHER_SEEDS
from tests.virtual import test_regions
from tests.virtual.test_regions import Lives

Patch = pytest.MonkeyPatch


def adopted_slots_are_not_verified(patch: Patch) -> None:
    patch.setattr(Seals, "_are_unproven", lambda *_: False)


def the_epoch_is_not_raised(patch: Patch) -> None:
    patch.setattr(Region, "begin", lambda self, epoch, namespace, shape: None)
    patch.setattr(SlotTable, "newest_epoch", property(lambda self: 0))


def parents_are_not_looked_at(patch: Patch) -> None:
    """What has lost its parent begins a chain."""
    patch.setattr(naming, "MISSING", naming.NO_PARENT)


def a_reset_forgets_the_region(patch: Patch) -> None:
    patch.setattr(Lasting, "reset", lambda self: None)


def rows_are_written_before_bytes(patch: Patch) -> None:
    """A slot's row does not lose its generation while other bytes come into it."""

    def unseal(self: Seals, slots: Any) -> None:
        pass

    patch.setattr(Seals, "unseal", unseal)


def rows_are_not_checked(patch: Patch) -> None:
    def kept(self: SlotTable) -> Kept:
        return self._rows(np.flatnonzero(self.seals.fills > 0))

    patch.setattr(SlotTable, "kept", kept)


def what_failed_is_told(patch: Patch) -> None:
    original = Stores._end

    def end(self: Stores, job: Any) -> None:
        original(self, job)
        self._common.committed(job.task.plan)

    patch.setattr(Stores, "_end", end)


def one_ranks_word_counts(patch: Patch) -> None:
    original = adoption._agreed
    patch.setattr(adoption, "_agreed", lambda facts, num_slots: original(facts[:1], num_slots))


def of_lives(test: Callable[..., None], num_ranks: int = 1) -> Callable[[], None]:
    return lambda: test(Lives(num_ranks))


def a_byte_that_changed() -> None:
    test_regions.test_a_byte_that_changed_meanwhile_is_found("never", True)


def test_epochs_rise() -> None:
    lives = Lives(2)
    for epoch in (1, 2, 3):
        lives.ask(test_regions.OTHER)
        filled = lives.engine.side.restores._common.filled_by
        assert lives.engine.side.ledger.open(lives.engine.side.stores, None, 1).job_id >> EPOCH_SHIFT == epoch  # type: ignore[arg-type]
        assert (filled[filled >= 0] >> EPOCH_SHIFT == 1).all()
        lives.restart()
    lives.end()


@dataclass(frozen=True)
class Mutant:
    """``apply`` puts it wrong, and ``caught_by`` says so."""

    apply: Callable[[Patch], None]
    caught_by: Callable[[], None]


MUTANTS = [
    Mutant(adopted_slots_are_not_verified, a_byte_that_changed),
    Mutant(the_epoch_is_not_raised, test_epochs_rise),
    Mutant(parents_are_not_looked_at, of_lives(test_regions.test_a_branch_whose_beginning_was_used_again)),
    Mutant(
        a_reset_forgets_the_region, of_lives(test_regions.test_after_a_reset_nothing_is_kept_until_a_restart)
    ),
    Mutant(
        rows_are_written_before_bytes, of_lives(test_regions.test_slots_that_are_being_filled_are_not_found)
    ),
    Mutant(rows_are_not_checked, test_table.test_a_sealed_slot_that_was_not_kept_says_nothing),
    Mutant(
        what_failed_is_told,
        of_lives(test_regions.test_a_store_of_blocks_that_were_no_kv_is_not_found_again),
    ),
    Mutant(one_ranks_word_counts, test_regions.test_a_rank_that_lost_its_region_is_found),
]


@pytest.mark.skipif(OTHER_SEEDS != 0, reason="how soon a mutant is met is up to the seeds")
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.apply.__name__)
def test_mutant_is_caught(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant.apply(monkeypatch)
    with pytest.raises(AssertionError) as caught:
        mutant.caught_by()
    print(f"{mutant.apply.__name__}: {str(caught.value).splitlines()[-1][:150]}")


def test_random_histories_over_regions() -> None:
    for seed in range(OTHER_SEEDS, OTHER_SEEDS + 12):
        run_seed(seed, 150, kind="region")
