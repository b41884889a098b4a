"""One thing is taken out of what makes siblings safe to read: a test of siblings says so."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest

from offload.files.superblock import Superblock
from offload.messages import EPOCH_SHIFT, Ids
from offload.scheduler.tiers.fetches import Fetches
from offload.scheduler.tiers.siblings import SiblingFetches
from offload.testing.virtual.run import run_seed
from offload.worker.media import siblings as medium
from offload.worker.pool import siblings as regions
from offload.worker.pool.siblings import OpenSibling
from tests.seeds import OTHER_SEEDS
from tests.virtual import test_siblings as tests
from tests.virtual.test_siblings import Beside

Patch = pytest.MonkeyPatch


def generations_are_not_read_after_the_copy(patch: Patch) -> None:
    original, was_read = medium._are_current, [False]

    def are_current(opened: OpenSibling, pieces: object) -> bool:
        was_read[0] = not was_read[0]
        return not was_read[0] or original(opened, pieces)  # type: ignore[arg-type]

    patch.setattr(medium, "_are_current", are_current)


def epochs_are_ignored(patch: Patch) -> None:
    original = OpenSibling.are_current

    def are_current(self: OpenSibling, slot: int, generations: Ids) -> bool:
        epochs = np.arange(20)[:, None] << EPOCH_SHIFT
        jobs = generations & ((1 << EPOCH_SHIFT) - 1)
        return any(original(self, slot, epoch | jobs) for epoch in epochs)

    patch.setattr(OpenSibling, "are_current", are_current)


def namespaces_are_not_compared(patch: Patch) -> None:
    class Any(str):
        def __ne__(self, other: object) -> bool:
            return False

    original = regions.read_superblock

    def read(directory: object) -> Superblock | None:
        found = original(directory)  # type: ignore[arg-type]
        return None if found is None else replace(found, namespace=Any(found.namespace))

    patch.setattr(regions, "read_superblock", read)


def checksums_are_not_compared(patch: Patch) -> None:
    patch.setattr(medium, "check_seals", lambda *_: None)


def a_reset_forgets_siblings(patch: Patch) -> None:
    patch.setattr(SiblingFetches, "reset", Fetches.reset)


def filled_again(generation: int) -> Callable[[], None]:
    def test() -> None:
        with Patch.context() as patch:
            tests.test_a_slot_that_is_filled_again_under_the_copy_is_missed(patch, False, generation)

    return test


def of_a_namespace() -> None:
    with Patch.context() as patch:
        tests.test_a_region_of_another_namespace_is_none(patch)


@dataclass(frozen=True)
class Mutant:
    """``apply`` puts it wrong, and ``caught_by`` says so."""

    apply: Callable[[Patch], None]
    caught_by: Callable[[], None]


MUTANTS = [
    Mutant(generations_are_not_read_after_the_copy, filled_again(7)),
    Mutant(epochs_are_ignored, filled_again(tests.SAME_JOB)),
    Mutant(namespaces_are_not_compared, of_a_namespace),
    Mutant(checksums_are_not_compared, lambda: tests.test_a_byte_that_changed_there_costs_a_miss(0)),
    Mutant(a_reset_forgets_siblings, lambda: tests.test_after_a_reset_siblings_have_nothing(Beside())),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.apply.__name__)
def test_mutant_is_caught(mutant: Mutant, monkeypatch: Patch) -> None:
    mutant.caught_by()
    mutant.apply(monkeypatch)
    with pytest.raises(AssertionError) as caught:
        mutant.caught_by()
    print(f"{mutant.apply.__name__}: {str(caught.value).splitlines()[-1][:150]}")


def test_random_histories_beside_each_other() -> None:
    for seed in range(OTHER_SEEDS, OTHER_SEEDS + 12):
        run_seed(seed, 150, kind="siblings")
