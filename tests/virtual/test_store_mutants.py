"""What is easy to get wrong with a store that others write, too, each put wrong on purpose."""

from collections.abc import Callable
from typing import Any

import pytest

from offload.messages import JobReport
from offload.scheduler.tiers.beliefs import Beliefs
from offload.scheduler.tiers.probes import Probes
from offload.scheduler.tiers.shared import SharedDirectory, SharedReading
from offload.testing.media.faulty import MediumFault
from offload.testing.media.store import StoreMedium
from offload.worker.media.base import Verb
from tests.seeds import OTHER_SEEDS
from tests.virtual import test_stores
from tests.virtual.test_stores import Stored

Patch = pytest.MonkeyPatch


def beliefs_are_never_dropped(patch: Patch) -> None:
    patch.setattr(Beliefs, "deny", lambda *_: None)


def beliefs_have_no_age(patch: Patch) -> None:
    original = Beliefs.depth
    patch.setattr(Beliefs, "depth", lambda self, names, *_, **also: original(self, names, 1e9, **also))


def one_ranks_word_counts(patch: Patch) -> None:
    original = JobReport.merged

    def merged(self: JobReport, other: JobReport) -> JobReport:
        return original(self, other)._replace(num_good=max(self.num_good, other.num_good))

    patch.setattr(JobReport, "merged", merged)


def a_reset_forgets_the_store(patch: Patch) -> None:
    patch.setattr(SharedDirectory, "reset", lambda self: self._beliefs.clear())


def all_resets_have_one_suffix(patch: Patch) -> None:
    original = SharedDirectory.__init__

    def init(self: SharedDirectory, *arguments: Any, **more: Any) -> None:
        original(self, *arguments, lambda num_bytes: bytes(num_bytes), **more)

    patch.setattr(SharedDirectory, "__init__", init)


def reading_forgets_the_suffix(patch: Patch) -> None:
    original = SharedReading.extents
    patch.setattr(
        SharedReading, "extents", lambda self, *arguments: original(self._replace(suffix=b""), *arguments)
    )


def nothing_is_checked(patch: Patch) -> None:
    patch.setattr(StoreMedium, "_check", lambda *_: None)


def everybody_waits(patch: Patch) -> None:
    original = Probes.ask
    patch.setattr(Probes, "ask", lambda *arguments, **more: original(*arguments, **more) or True)


def stored(test: Callable[..., None], num_ranks: int, *more: Any) -> Callable[[], None]:
    def run() -> None:
        made = Stored(num_ranks)
        test(made, *more)

    return run


def is_asked_again() -> None:
    """What was seen long ago is looked for."""
    made = Stored()
    test_stores.test_what_was_seen_is_not_asked_for_again_at_once(made)


def a_short_fetch_of_a_rank() -> None:
    made = Stored(3)
    made.ask()
    made.restart()
    made.fault(Verb.PROBE, MediumFault.LIE)
    [key] = [key for key, each in made.store.kept.items() if key.rank == 1 and each.depth == 14]
    made.store.evict(key)
    made.ask()
    made.engine.audit.check_pool()


MUTANTS = [
    (beliefs_are_never_dropped, stored(test_stores.test_what_is_gone_is_not_offered_again, 1)),
    (beliefs_are_never_dropped, stored(test_stores.test_a_store_that_lies_is_believed_once, 3)),
    (beliefs_have_no_age, is_asked_again),
    (one_ranks_word_counts, a_short_fetch_of_a_rank),
    (a_reset_forgets_the_store, stored(test_stores.test_after_a_reset_each_finds_its_own_alone, 1)),
    (all_resets_have_one_suffix, stored(test_stores.test_after_a_reset_each_finds_its_own_alone, 1)),
    (all_resets_have_one_suffix, stored(test_stores.test_a_second_reset_hides_what_came_after_the_first, 1)),
    (reading_forgets_the_suffix, stored(test_stores.test_after_a_reset_each_finds_its_own_alone, 1)),
    (nothing_is_checked, stored(test_stores.test_wrong_bytes_are_dropped_there_and_put_again, 1)),
    (everybody_waits, test_stores.test_nobody_waits_for_a_store_that_hangs),
    (everybody_waits, test_stores.test_steps_are_those_without_a_tier_when_the_store_never_answers),
]


@pytest.mark.skipif(OTHER_SEEDS != 0, reason="how soon a mutant is met is up to the seeds")
@pytest.mark.parametrize(("apply", "caught_by"), MUTANTS, ids=lambda each: getattr(each, "__name__", ""))
def test_mutant_is_caught(
    apply: Callable[[Patch], None], caught_by: Callable[[], None], monkeypatch: Patch
) -> None:
    apply(monkeypatch)
    with pytest.raises(AssertionError) as caught:
        caught_by()
    print(f"{apply.__name__}: {str(caught.value).splitlines()[-1][:150]}")
