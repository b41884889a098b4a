"""One thing is taken out of what lets requests pass whose KV has arrived: a test of that says so."""

from collections.abc import Callable
from functools import partial
from math import inf
from typing import Any

import pytest

from offload.scheduler import aside
from offload.scheduler.aside import Aside
from offload.scheduler.choices import Choices
from offload.vllm.engine import VllmEngine
from tests.virtual import test_aside as tests
from tests.virtual.driver import Engines

Patch = pytest.MonkeyPatch


def nobody_steps_aside(patch: Patch) -> None:
    patch.setattr(Aside, "must", lambda *_: False)


def it_steps_aside_for_ever(patch: Patch) -> None:
    patch.setattr(aside, "_AT_MOST", 1e9)


def a_long_step_ends_its_patience(patch: Patch) -> None:
    patch.setattr(aside, "_A_STEP", inf)


def who_comes_later_is_waited_for(patch: Patch) -> None:
    patch.setattr(aside, "_WITH_IT", 1e9)


def no_step_is_left_to_those_that_go_on(patch: Patch) -> None:
    patch.setattr(aside._Turn.__init__, "__defaults__", (0,))


def each_step_is_left_to_those_that_go_on(patch: Patch) -> None:
    patch.setattr(aside, "_STEPS", 1_000_000)
    patch.setattr(aside._Turn.__init__, "__defaults__", (1_000_000,))


def those_behind_are_not_looked_at(patch: Patch) -> None:
    patch.setattr(aside, "_NEW", 0)


def priorities_are_ignored(patch: Patch) -> None:
    original = aside._Least.least
    everybody = aside._Place(1_000_000, inf)
    patch.setattr(aside._Least, "least", lambda self, last: original(self, everybody))
    patch.setattr(Aside, "_may_pass", lambda *_, **__: True)
    begin = aside._Turn.__init__

    def init(self: Any, last: object, *others: Any) -> None:
        begin(self, everybody, *others)

    patch.setattr(aside._Turn, "__init__", init)


def who_lacks_little_steps_aside(patch: Patch) -> None:
    patch.setattr(aside, "_FEWER", 1)
    original = Aside.__init__

    def init(self: Aside, *arguments: Any) -> None:
        original(self, *arguments)
        self._least_tokens = 0

    patch.setattr(Aside, "__init__", init)


def it_counts_that_nobody_has_arrived(patch: Patch) -> None:
    patch.setattr(Aside, "_may_pass", lambda *_, **__: True)
    patch.setattr(aside._Least, "least", lambda *_: -inf)


def restores_are_believed_to_pay(patch: Patch) -> None:
    patch.setattr(Choices, "may_restore", lambda *_: True)


def no_restore_is_believed_to_pay(patch: Patch) -> None:
    patch.setattr(Choices, "may_restore", lambda *_: False)


def what_the_gpu_has_does_not_count(patch: Patch) -> None:
    patch.setattr(VllmEngine, "has", lambda *_: False)


def it_never_counts_how_long_it_has_waited(patch: Patch) -> None:
    original = Aside._may_pass
    patch.setattr(Aside, "_may_pass", lambda *arguments, is_late: original(*arguments, is_late=False))


def who_has_waited_lets_nobody_pass(patch: Patch) -> None:
    original = Aside._may_pass
    patch.setattr(
        Aside,
        "_may_pass",
        lambda *arguments, is_late: not is_late and original(*arguments, is_late=False),
    )


Check = Callable[[Engines], None]


def in_order(make: Engines) -> None:
    tests.test_those_that_arrived_have_their_first_token_before_others_begin(make, 1, (0, 1, 2, 3))


def after_a_long_step(make: Engines) -> None:
    overlapped = partial(make, overlapped=True)
    tests.test_those_that_came_in_a_long_step_go_on_before_another_long_one(overlapped)


def for_ever(make: Engines) -> None:
    tests.test_restores_that_follow_each_other_for_ever_starve_nobody(make, is_sooner=True)


def after_others(make: Engines) -> None:
    with pytest.MonkeyPatch.context() as patch:
        tests.test_who_has_waited_lets_nobody_pass_for_what_the_gpu_has(make, patch, 2)


def after_others_with_restores(make: Engines) -> None:
    with pytest.MonkeyPatch.context() as patch:
        tests.test_who_has_waited_lets_those_pass_that_are_restored(make, patch)


def by_priority(make: Engines) -> None:
    tests.test_who_comes_first_by_priority_lets_nobody_pass_that_comes_behind(make, is_sooner=True)


MUTANTS: list[tuple[Callable[[Patch], None], Check]] = [
    (nobody_steps_aside, in_order),
    (it_steps_aside_for_ever, tests.test_restores_that_take_long_are_not_waited_for),
    (a_long_step_ends_its_patience, after_a_long_step),
    (no_step_is_left_to_those_that_go_on, after_a_long_step),
    (each_step_is_left_to_those_that_go_on, for_ever),
    (who_comes_later_is_waited_for, tests.test_who_comes_later_is_not_waited_for),
    (those_behind_are_not_looked_at, in_order),
    (priorities_are_ignored, by_priority),
    (who_lacks_little_steps_aside, tests.test_who_lacks_little_lets_nobody_pass),
    (restores_are_believed_to_pay, tests.test_who_comes_behind_and_is_computed_anyway_does_not_pass),
    (no_restore_is_believed_to_pay, in_order),
    (
        what_the_gpu_has_does_not_count,
        tests.test_who_comes_behind_and_is_on_the_gpu_passes_though_nothing_is_restored,
    ),
    (it_never_counts_how_long_it_has_waited, after_others),
    (who_has_waited_lets_nobody_pass, after_others_with_restores),
    (it_counts_that_nobody_has_arrived, tests.test_nobody_waits_where_all_are_lost),
]


@pytest.mark.parametrize(("apply", "check"), MUTANTS, ids=[apply.__name__ for apply, _ in MUTANTS])
def test_mutant_is_caught(
    apply: Callable[[Patch], None], check: Check, engines: Engines, monkeypatch: Patch
) -> None:
    def make(**settings: Any) -> Any:
        defaults = {"gpu_blocks": 160, "cpu_slots": 160, "chunk": 48, "step_seconds": tests.SOON}
        return engines(**(defaults | settings))

    check(make)
    apply(monkeypatch)
    with pytest.raises(AssertionError):
        check(make)
