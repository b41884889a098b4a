"""What is decided about restores, what that is decided with, and what is counted."""

from typing import Any

import numpy as np
import pytest

from allocator import CpuOffloadingBlockAllocator
from offload.messages import LOAD, STORE
from offload.observe.metrics import Metrics
from offload.restore_config import RestoreWhen
from offload.scheduler import choices as module
from offload.scheduler.arrivals import Arrivals
from offload.scheduler.choice import Choice, Prospect, Verdict
from offload.scheduler.choices import TRY_SECONDS, Choices
from offload.scheduler.common import Common
from offload.scheduler.costs import Costs, LinkCost, PrefillCost
from offload.scheduler.jobs import JobLedger
from offload.scheduler.spelling import SlotTokens
from offload.scheduler.why.notes import Notes
from offload.testing.memory_engine import MemoryEngine, MemoryRequest

SIZE, BLOCK_BYTES = 10, 1000
NUM_TOKENS = 1001
STOP = 1000
"""What the pool has of a request. A token takes a millisecond to compute."""


class Desk:
    """Where requests come, ask and are admitted, on a clock that the test moves."""

    def __init__(self, when: RestoreWhen = RestoreWhen.AUTO) -> None:
        self.now = 1000.0
        self.metrics, self.costs = Metrics(), Costs(lambda: self.now, 1000)
        engine, allocator = MemoryEngine(100, SIZE), CpuOffloadingBlockAllocator(60)
        fills = np.zeros(60, dtype=np.int64)
        ledger, arrivals = JobLedger(1), Arrivals(allocator, 100)
        parts = allocator, ledger, engine, self.metrics
        common = Common(
            *parts,
            lambda: self.now,
            SIZE,
            BLOCK_BYTES,
            BLOCK_BYTES,
            fills,
            arrivals,
            self.costs,
            SlotTokens(fills, SIZE),
            Notes(parts, lambda: self.now, SIZE, self.costs, arrivals.fetched),
        )
        self.choices = Choices(common, when)
        self._num = 0

    def measure(self, link: float | None = None, *, stores: float | None = None) -> None:
        """A token takes a millisecond to compute, and that long to load or to store."""
        step = self.costs.prefill.begin(1000, lambda: 0.0)
        self.now += 1.0
        self.costs.prefill.end(step)
        for route, seconds in ((LOAD, link), (STORE, stores)):
            for num_tokens in (10, 100, 1000) * 11 if seconds is not None else ():
                num_bytes = num_tokens * BLOCK_BYTES // SIZE
                self.costs.link(route).add(num_bytes, num_tokens * (seconds or 0), self.now)

    def come(self) -> MemoryRequest:
        self._num += 1
        request = MemoryRequest(f"r{self._num}", range(NUM_TOKENS), [7], SIZE)
        self.choices.arrived(request)
        return request

    def ask(self, request: MemoryRequest, first: int = 0, restoring: int = 0, **how: bool) -> int:
        wanted, coming = how.get("wanted", False), how.get("coming", False)
        return self.choices.make(request, first, STOP, restoring, is_wanted=wanted, is_coming=coming)

    def admit(self, request: MemoryRequest, num_external: int, num_local: int = 0) -> None:
        self.choices.admitted(request, num_local, num_external)
        self.choices.check_invariants()

    def serve(self) -> int:
        """A request comes, asks, is admitted and ends. Returns how many tokens it loads."""
        request = self.come()
        stop = self.ask(request)
        self.admit(request, stop)
        self.choices.finish(request.request_id)
        assert request.request_id not in self.choices.left_over()
        return stop

    @property
    def counts(self) -> dict[str, float]:
        """What was counted, by verdict."""
        totals = self.metrics.totals
        return {key.partition(":")[2]: totals[key] for key in totals if key.startswith("restore_choices:")}


def test_at_first_all_is_loaded() -> None:
    desk = Desk()
    assert desk.serve() == STOP
    assert desk.counts == {"unmeasured": 1}


@pytest.mark.parametrize(("seconds", "stop", "verdict"), [(0.0005, STOP, "loaded"), (0.002, 0, "computed")])
def test_what_is_over_sooner_is_done_and_counted(seconds: float, stop: int, verdict: str) -> None:
    desk = Desk()
    desk.measure(seconds)
    assert [desk.serve(), desk.serve()] == [stop, stop]
    assert desk.counts == {verdict: 2}


def test_how_long_a_request_takes_is_noted_once_when_it_is_admitted() -> None:
    """While it asks it waits, and would become more patient by that."""
    desk = Desk()
    desk.measure(0.002)
    desk.choices._tried_at = desk.now + 100.0
    request = desk.come()
    for _ in range(5):
        desk.now += 1.0
        assert desk.ask(request) == 0
        assert desk.choices._longest.seconds == 0
    desk.admit(request, 0)
    assert desk.choices._longest.seconds == pytest.approx(6.0, rel=0.01)
    other = desk.come()
    desk.ask(other, wanted=True)
    desk.now += 20.0
    desk.admit(other, STOP)
    assert desk.choices._longest.seconds == pytest.approx(6.0, rel=0.01), "nothing was chosen for it"


def test_a_link_that_nothing_was_loaded_over_is_as_fast_as_stores_say() -> None:
    desk = Desk()
    desk.choices._tried_at = desk.now + 1
    desk.measure(stores=0.002)
    assert desk.serve() == 0
    desk.measure(0.0005)
    assert desk.serve() == STOP


@pytest.mark.parametrize(("when", "stop"), [(RestoreWhen.ALWAYS, STOP), (RestoreWhen.AUTO, 0)])
def test_what_is_configured_goes_before_what_is_measured(when: RestoreWhen, stop: int) -> None:
    desk = Desk(when)
    desk.measure(0.002)
    assert not desk.choices.is_off and Desk(RestoreWhen.NEVER).choices.is_off
    assert desk.serve() == stop
    assert desk.counts == ({"always": 1} if stop else {"computed": 1})


@pytest.mark.parametrize(("seconds", "may"), [(0.0005, True), (0.0039, True), (0.0041, False)])
def test_a_restore_may_be_made_unless_it_takes_far_longer_than_computing(seconds: float, may: bool) -> None:
    desk = Desk()
    assert desk.choices.may_restore(0, STOP), "nothing is known"
    desk.measure(seconds)
    assert desk.choices.may_restore(0, STOP) is may is desk.choices.may_restore(500, STOP)
    for when in (RestoreWhen.ALWAYS, RestoreWhen.NEVER):
        fixed = Desk(when)
        fixed.measure(seconds)
        assert fixed.choices.may_restore(0, STOP) is (when is RestoreWhen.ALWAYS)


@pytest.mark.parametrize(("bag_slots", "may"), [(99, True), (101, False)])
def test_what_a_checkpoint_moves_counts(bag_slots: int, may: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk()
    desk.measure(0.002)
    monkeypatch.setattr(desk.choices._common.engine.groups, "bag_slots", bag_slots)
    assert desk.choices.may_restore(0, STOP) is may


@pytest.mark.parametrize(("how", "verdict"), [("wanted", "asked"), ("coming", "fetched")])
def test_what_is_wanted_or_comes_from_below_is_loaded_whatever_it_costs(how: str, verdict: str) -> None:
    desk = Desk()
    desk.measure(0.002)
    request = desk.come()
    stop = desk.ask(request, **{how: True})
    assert stop == STOP
    desk.admit(request, stop)
    assert desk.counts == {verdict: 1}


def test_a_part_is_of_whole_blocks() -> None:
    desk = Desk()
    desk.measure(0.002)
    desk.choices._longest.note(2.0)
    request = desk.come()
    desk.come()
    part = desk.ask(request)
    assert 0 < part < STOP and part % SIZE == 0
    desk.admit(request, part)
    assert desk.counts == {"part": 1}


def test_a_part_that_no_checkpoint_is_in_is_computed() -> None:
    desk = Desk()
    desk.measure(0.002)
    desk.choices._longest.note(2.0)
    request = desk.come()
    desk.come()
    assert desk.ask(request) > 0
    desk.choices.dismissed(request.request_id)
    desk.admit(request, 0)
    assert desk.counts == {"computed": 1}


def test_what_was_chosen_and_did_not_come_about_is_not_counted() -> None:
    """GPU blocks were short, say."""
    desk = Desk()
    desk.measure(0.0005)
    request = desk.come()
    assert desk.ask(request) == STOP
    desk.admit(request, 0)
    assert desk.counts == {}


def test_who_is_asked_again_and_again_counts_once() -> None:
    desk = Desk()
    desk.measure(0.0005)
    request = desk.come()
    for _ in range(5):
        stop = desk.ask(request)
    desk.admit(request, stop)
    desk.admit(request, 0)  # it goes on
    assert desk.counts == {"loaded": 1}


def test_who_goes_on_is_computed_and_others_may_load_meanwhile() -> None:
    desk = Desk()
    desk.measure(0.002)
    desk.choices._longest.note(1e6)
    busy = desk.come()
    desk.admit(busy, 0)
    assert desk.serve() == STOP, "it takes a second to compute that one"
    busy.num_computed_tokens = NUM_TOKENS
    assert desk.serve() == 0, "nobody else needs the GPU"


def test_what_is_on_the_link_counts() -> None:
    desk = Desk()
    desk.measure(0.0008)
    assert desk.serve() == STOP
    desk.choices.queue.begin(STOP * BLOCK_BYTES // SIZE)
    assert desk.serve() == 0
    desk.choices.queue.end(STOP * BLOCK_BYTES // SIZE)
    assert desk.serve() == STOP


def test_others_that_are_restored_are_not_held_up_by_a_prefill() -> None:
    desk = Desk()
    desk.measure(0.0005)
    desk.choices.queue.begin(STOP * BLOCK_BYTES // SIZE * 2)
    asked = desk.come()
    assert (desk.ask(asked, restoring=0), desk.ask(asked, restoring=8)) == (0, STOP)


def test_who_has_waited_for_long_does_not_wait_for_a_slow_link() -> None:
    desk = Desk()
    desk.measure(0.0015)
    desk.choices._longest.note(5.0)  # so the patience is two seconds
    request, other = desk.come(), desk.come()
    assert desk.ask(request) == STOP
    desk.now += 1.9
    assert desk.ask(request) < STOP
    desk.now += 0.2
    assert desk.ask(request) == 0
    desk.choices.finish(other.request_id)


def slow_link(desk: Desk) -> None:
    desk.measure(0.003)
    assert desk.serve() == 0


def test_now_and_then_a_little_is_loaded_to_see_whether_the_link_is_still_slow() -> None:
    desk = Desk()
    slow_link(desk)
    desk.choices._longest.note(10.0)
    desk.now += TRY_SECONDS - 0.01
    assert desk.serve() == 0
    desk.now += 0.02
    sizes = []
    for _ in range(3):
        sizes.append(desk.serve())
        assert desk.serve() == 0, "not twice"
        desk.now += TRY_SECONDS
        desk.choices._longest.note(10.0)
    assert 0 < sizes[0] == sizes[2] < sizes[1] < 0.1 * STOP, "jobs of two sizes"
    assert desk.counts["tried"] == 3


def test_where_nobody_has_time_it_is_tried_less_often() -> None:
    desk = Desk()
    slow_link(desk)
    desk.now += 3 * TRY_SECONDS - 0.01
    desk.choices._longest._before = desk.choices._longest._now = 0.0
    assert desk.serve() == 0
    desk.now += 0.02
    desk.choices._longest._before = desk.choices._longest._now = 0.0
    assert desk.serve() > 0


def test_a_try_that_did_not_come_about_is_made_again() -> None:
    desk = Desk()
    slow_link(desk)
    desk.now += 4 * TRY_SECONDS
    request = desk.come()
    assert desk.ask(request) > 0
    desk.admit(request, 0)
    assert desk.counts == {"computed": 1}
    assert desk.serve() > 0


def test_a_link_that_has_become_fast_is_used_within_a_minute() -> None:
    """And the other way round."""
    desk = Desk()
    slow_link(desk)
    per_byte = 0.0001 * SIZE / BLOCK_BYTES
    until = desk.now + 30
    while desk.now < until:
        desk.now += 1
        desk.choices._longest.note(10.0)
        if stop := desk.serve():
            num_bytes = stop * BLOCK_BYTES // SIZE
            desk.costs.link(LOAD).add(num_bytes, num_bytes * per_byte, desk.now)
        if stop == STOP:
            break
    assert stop == STOP and desk.counts["tried"] == 4
    for number in range(5):
        assert desk.serve() == (STOP if number < 4 else 0)
        desk.costs.link(LOAD).add(STOP * BLOCK_BYTES // SIZE, 9.0, desk.now)


def test_with_checkpoints_all_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    desk = Desk()
    slow_link(desk)
    monkeypatch.setattr(desk.choices._common.engine.groups, "has_bags", True, raising=False)
    desk.now += 2 * TRY_SECONDS
    desk.choices._longest.note(10.0)
    assert desk.serve() == 0, "less often"
    desk.now += TRY_SECONDS
    assert desk.serve() == STOP
    assert desk.counts["tried"] == 1


def test_what_is_looked_at_is_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Prospect] = []

    def choose(prefill: PrefillCost, link: LinkCost, prospect: Prospect) -> Choice:
        seen.append(prospect)
        return Choice(prospect.stop, Verdict.LOADED, 1.0, 2.0)

    monkeypatch.setattr(module, "choose", choose)
    desk: Any = Desk()
    desk.measure(0.001)
    request, other = desk.come(), desk.come()
    desk.now += 0.5
    desk.choices.queue.begin(100)
    desk.ask(request, 20)
    desk.admit(request, STOP - 20, 20)
    desk.ask(other, 20)
    first, again = seen
    assert first[:5] == (20, STOP, NUM_TOKENS, BLOCK_BYTES / SIZE, 0.0)
    assert first.queue == pytest.approx(0.001)
    assert first.backlog == pytest.approx(NUM_TOKENS * 0.001)
    assert (first.patience, again.patience) == pytest.approx((-0.5, 0.4 * 2.5 - 0.5))
    desk.choices.finish(other.request_id)
