"""One thing is taken out of what makes peers safe, exact or prompt: a test of peers says so."""

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Any

import numpy as np
import pytest

from offload.messages import JobReport
from offload.peer_messages import PeerLife
from offload.scheduler.jobs import JobLedger
from offload.scheduler.lasting import Lasting
from offload.scheduler.leases import Leases
from offload.scheduler.tiers import peer_fetches, peer_wish
from offload.scheduler.tiers.fetches import Fetches
from offload.scheduler.tiers.peer_fetches import PeerFetches
from offload.scheduler.tiers.peer_wish import PeerWish
from offload.scheduler.tiers.peers import Found, PeerDirectory
from offload.scheduler.tiers.siblings import SiblingFetches
from offload.worker.peers.fleet import Fleet
from offload.worker.peers.holdings import Holdings
from tests.offload.scheduler import test_hand_offs as hand_offs
from tests.virtual import test_peers as tests
from tests.virtual.test_peers import Pair

Patch = pytest.MonkeyPatch


def generations_are_not_looked_at_again(patch: Patch) -> None:
    patch.setattr(Holdings, "are_current", lambda self, rows: np.ones(len(rows.slots), dtype=np.bool_))


def what_fell_short_is_used_as_a_whole(patch: Patch) -> None:
    patch.setattr(PeerFetches, "_commit", Fetches._commit)


def what_fell_short_is_lost_as_a_whole(patch: Patch) -> None:
    patch.setattr(PeerFetches, "advance", Fetches.advance)


def what_is_fetched_is_committed_before_it_has_landed(patch: Patch) -> None:
    original = PeerFetches._open

    def open_(self: PeerFetches, plan: Any, path: Any, batch: Any) -> None:
        original(self, plan, path, batch)
        self._common.allocator.commit(plan)

    patch.setattr(PeerFetches, "_open", open_)
    patch.setattr(PeerFetches, "_commit", lambda *_: None)


def leases_are_not_ended(patch: Patch) -> None:
    patch.setattr(PeerDirectory, "release", lambda *_: None)


def leases_have_no_end(patch: Patch) -> None:
    patch.setattr(Leases, "expire", lambda self: None)


def epochs_are_ignored(patch: Patch) -> None:
    original = Fleet.of
    patch.setattr(Fleet, "of", lambda self, life: original(self, PeerLife(life.peer)))


def a_reset_forgets_peers(patch: Patch) -> None:
    patch.setattr(SiblingFetches, "reset", Fetches.reset)


def deadlines_run_from_the_question(patch: Patch) -> None:
    original = PeerFetches._wait_on

    def wait_on(self: PeerFetches, wish: PeerWish, now: float) -> None:
        if wish.until == inf:
            original(self, wish, now)

    patch.setattr(PeerFetches, "_wait_on", wait_on)


def references_are_believed(patch: Patch) -> None:
    original = PeerDirectory.answer

    def answer(self: PeerDirectory, life: Any, chain: Any) -> Found:
        found = original(self, life, chain)
        return found if life is None or found.reason else found._replace(depth=len(chain))

    patch.setattr(PeerDirectory, "answer", answer)


def tips_are_not_compared(patch: Patch) -> None:
    patch.setattr(peer_wish, "tip_of", lambda prefix_hash: AnyTip())


class AnyTip(str):
    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = str.__hash__


def the_word_of_the_best_rank_counts(patch: Patch) -> None:
    original = JobReport.merged

    def merged(self: JobReport, other: JobReport) -> JobReport:
        return original(self, other)._replace(num_good=max(self.num_good, other.num_good))

    patch.setattr(JobReport, "merged", merged)
    assert JobLedger.report


def nobody_stops_waiting(patch: Patch) -> None:
    patch.setattr(PeerWish, "seconds", lambda *_: 1e9)


def tails_are_forgotten(patch: Patch) -> None:
    def whole(self: PeerFetches, chain: Any, stop: int) -> Any:
        return self._grid.path(chain, stop // self._grid.positions * self._grid.positions)

    patch.setattr(PeerFetches, "_prefix_path", whole)


def names_are_those_of_extents(patch: Patch) -> None:
    def read(self: Any, plan: Any, path: Any, first: int, last: int) -> Any:
        return self._directory.read(path.names, first, last)

    patch.setattr(SiblingFetches, "_read", read)


def peers_are_asked_in_each_step(patch: Patch) -> None:
    patch.setattr(peer_fetches, "_SOONEST", 0.0)
    patch.setattr(peer_fetches, "_LATEST", 0.0)


def with_pair(test: Callable[..., None], *arguments: Any, num_ranks: int = 1) -> Callable[[], None]:
    return lambda: test(Pair(num_ranks), *arguments)


def the_pace_of_peers_is_not_learned(patch: Patch) -> None:
    original = PeerFetches._wait_on

    def wait_on(self: PeerFetches, wish: PeerWish, now: float) -> None:
        wish.gap = 0.0
        original(self, wish, now)

    patch.setattr(PeerFetches, "_wait_on", wait_on)


def nobody_is_told_of_refusals(patch: Patch) -> None:
    patch.setattr(Lasting, "refuse", lambda *_: None)


def refusals_are_for_ever(patch: Patch) -> None:
    patch.setattr(Lasting, "expect", lambda *_: None)


@dataclass(frozen=True)
class Mutant:
    """``apply`` puts it wrong, and ``caught_by`` says so."""

    apply: Callable[[Patch], None]
    caught_by: Callable[[], None]


REFERENCES, LOST = tests.TestReferences(), tests.TestWhatDoesNotArrive()
EXPECTS = tests.TestWhoExpectsAPromptIsTold()


def with_patient_pair(test: Callable[[Pair], None]) -> Callable[[], None]:
    return lambda: test(tests.patient_pair())


MUTANTS = [
    Mutant(
        generations_are_not_looked_at_again,
        lambda: tests.test_a_slot_that_is_filled_anew_while_it_is_sent_is_missed(True),
    ),
    Mutant(
        what_fell_short_is_used_as_a_whole, with_pair(LOST.test_exactly_the_missing_tokens_are_computed, 5000)
    ),
    Mutant(
        what_fell_short_is_lost_as_a_whole, with_pair(LOST.test_exactly_the_missing_tokens_are_computed, 5000)
    ),
    Mutant(
        what_is_fetched_is_committed_before_it_has_landed,
        with_pair(LOST.test_exactly_the_missing_tokens_are_computed, 5000),
    ),
    Mutant(leases_have_no_end, hand_offs.test_leased_blocks_stay_and_are_ordinary_cache_afterwards),
    Mutant(leases_are_not_ended, with_pair(REFERENCES.test_what_the_peer_keeps_is_released_whatever_happens)),
    Mutant(
        epochs_are_ignored,
        with_pair(REFERENCES.test_what_is_void_is_ignored, {"epoch": "c" * 16}, tests.Unused.OLD_EPOCH),
    ),
    Mutant(a_reset_forgets_peers, with_pair(tests.TestWeights().test_after_a_reset_peers_have_nothing)),
    Mutant(deadlines_run_from_the_question, tests.test_patience_begins_anew_with_each_progress),
    Mutant(references_are_believed, with_pair(REFERENCES.test_it_had_less_than_was_said)),
    Mutant(tips_are_not_compared, with_pair(REFERENCES.test_another_prompt_is_no_reference)),
    Mutant(the_word_of_the_best_rank_counts, tests.test_what_one_rank_lacks_nobody_has),
    Mutant(nobody_stops_waiting, with_pair(tests.test_who_expects_what_never_comes_computes)),
    Mutant(tails_are_forgotten, lambda: tests.test_the_tail_is_fetched_whatever_an_extent_is(16)),
    Mutant(names_are_those_of_extents, lambda: tests.test_the_tail_is_fetched_whatever_an_extent_is(16)),
    Mutant(the_pace_of_peers_is_not_learned, tests.test_patience_is_as_long_as_the_peer_takes_for_a_chunk),
    Mutant(nobody_is_told_of_refusals, with_patient_pair(EXPECTS.test_that_it_is_refused)),
    Mutant(refusals_are_for_ever, with_patient_pair(EXPECTS.test_that_it_is_refused_no_longer)),
    Mutant(peers_are_asked_in_each_step, with_pair(tests.test_nobody_is_asked_in_each_step)),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.apply.__name__)
def test_mutant_is_caught(mutant: Mutant, monkeypatch: Patch) -> None:
    mutant.caught_by()
    mutant.apply(monkeypatch)
    with pytest.raises(AssertionError) as caught:
        mutant.caught_by()
    print(f"{mutant.apply.__name__}: {str(caught.value).splitlines()[-1][:150]}")
