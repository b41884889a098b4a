"""One thing is taken out of what makes hand-offs right: a test of them says so."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import pytest

from allocator import CpuOffloadingBlockAllocator, StorePlan
from allocator.leases import Leases as LeasesOfPool
from offload.scheduler import hand_offs
from offload.scheduler.backlog import Pending
from offload.scheduler.breaker import CircuitBreaker
from offload.scheduler.engine import Request
from offload.scheduler.hand_offs import HandOffs
from offload.scheduler.lasting import Lasting
from offload.scheduler.leases import Leases
from tests.offload.scheduler import test_hand_offs, test_listening

Patch = pytest.MonkeyPatch


def leases_have_no_end(patch: Patch) -> None:
    patch.setattr(Leases, "expire", lambda self: None)


def leases_go_beyond_their_share(patch: Patch) -> None:
    patch.setattr(Leases, "has_room_for", lambda self, num_slots: True)


def nothing_is_leased(patch: Patch) -> None:
    patch.setattr(Leases, "grant", lambda self, chain, stop: None)


def what_several_lease_counts_for_each(patch: Patch) -> None:
    def num_slots(self: LeasesOfPool) -> int:
        return sum(lease.start for lease in self._leases)

    patch.setattr(LeasesOfPool, "num_slots", property(num_slots))


def a_release_ends_them_all(patch: Patch) -> None:
    def release(self: Leases, names: Sequence[bytes]) -> None:
        for lease in [each for name in names for each in self._by_name.get(name, ())]:
            self._end(lease)

    patch.setattr(Leases, "release", release)


def a_reset_keeps_leases(patch: Patch) -> None:
    patch.setattr(Leases, "reset", lambda self: None)


def a_reset_goes_on_with_the_life_before(patch: Patch) -> None:
    patch.setattr(Lasting, "reset", lambda self: None)


def names_nobody_has_are_handed_on(patch: Patch) -> None:
    patch.setattr(hand_offs, "is_private", lambda suffix: False)


def what_has_no_copy_waits_in_the_queue(patch: Patch) -> None:
    """As it does for a cache, where it gives way to new prompts."""

    def deliver(
        self: HandOffs, pending: Pending, num_full: int | None, breaker: CircuitBreaker
    ) -> StorePlan | None:
        pending.delivers = False
        return None

    patch.setattr(HandOffs, "deliver", deliver)


def what_has_no_copy_is_not_stored(patch: Patch) -> None:
    deliver = HandOffs.deliver

    def only_what_is_there(
        self: HandOffs, pending: Pending, num_full: int | None, breaker: CircuitBreaker
    ) -> StorePlan | None:
        return deliver(self, pending, None, breaker)

    patch.setattr(HandOffs, "deliver", only_what_is_there)


def hand_offs_are_worth_what_others_are(patch: Patch) -> None:
    plan = CpuOffloadingBlockAllocator.plan_store

    def by_worth(self, *arguments, must=False, **more):  # type: ignore[no-untyped-def]
        return plan(self, *arguments, **more)

    patch.setattr(CpuOffloadingBlockAllocator, "plan_store", by_worth)


def adapters_are_not_looked_at(patch: Patch) -> None:
    begin = HandOffs.begin

    def as_if_there_was_none(self: HandOffs, request: Request, *arguments: object, **named: object) -> bool:
        lora, request.lora_request = request.lora_request, None
        try:
            return begin(self, request, *arguments, **named)  # type: ignore[arg-type]
        finally:
            request.lora_request = lora

    patch.setattr(HandOffs, "begin", as_if_there_was_none)


class Mutant(NamedTuple):
    """What is taken out, and the test that says so."""

    apply: Callable[[Patch], None]
    caught_by: Callable[[], None]


MUTANTS = [
    Mutant(leases_have_no_end, test_hand_offs.test_leased_blocks_stay_and_are_ordinary_cache_afterwards),
    Mutant(
        leases_go_beyond_their_share,
        test_hand_offs.test_beyond_the_share_hand_offs_are_refused_and_stored_as_anything_else,
    ),
    Mutant(nothing_is_leased, test_hand_offs.test_leased_blocks_stay_and_are_ordinary_cache_afterwards),
    Mutant(what_several_lease_counts_for_each, test_hand_offs.test_a_shared_beginning_is_leased_once),
    Mutant(a_release_ends_them_all, test_hand_offs.test_a_lease_ends_when_a_peer_has_it_all),
    Mutant(
        a_reset_keeps_leases,
        test_hand_offs.test_a_reset_ends_all_leases_and_hands_nothing_off_until_weights_have_a_name,
    ),
    Mutant(
        a_reset_goes_on_with_the_life_before,
        test_listening.test_a_reset_begins_another_life_which_nobody_can_ask_for,
    ),
    Mutant(
        names_nobody_has_are_handed_on,
        test_hand_offs.test_a_reset_ends_all_leases_and_hands_nothing_off_until_weights_have_a_name,
    ),
    Mutant(
        what_has_no_copy_waits_in_the_queue,
        test_hand_offs.test_what_was_evicted_while_the_request_ran_is_stored_again_at_its_end,
    ),
    Mutant(
        what_has_no_copy_is_not_stored,
        test_hand_offs.test_what_was_evicted_while_the_request_ran_is_stored_again_at_its_end,
    ),
    Mutant(
        hand_offs_are_worth_what_others_are,
        test_hand_offs.test_hand_offs_take_the_place_of_what_is_worth_more,
    ),
    Mutant(adapters_are_not_looked_at, test_hand_offs.test_adapters_are_not_handed_off),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.apply.__name__)
def test_mutant_is_caught(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant.caught_by()
    mutant.apply(monkeypatch)
    with pytest.raises((AssertionError, KeyError, ValueError)):
        mutant.caught_by()
