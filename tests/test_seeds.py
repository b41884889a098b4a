"""No luck: every run draws the same, unless it is given another number, and then it draws otherwise."""

import random

import pytest
from hypothesis import settings

from tests import seeds
from tests.strategies import thorough


@pytest.mark.parametrize("of", [settings.default, thorough(7)], ids=["default", "thorough"])
def test_properties_draw_the_same_on_every_machine(of: settings) -> None:
    assert of.derandomize is (not seeds.OTHER_SEEDS)
    assert of.database is None, "an earlier failure would be drawn again"
    assert of.deadline is None, "a slow machine would fail"


def test_another_number_is_another_history(monkeypatch: pytest.MonkeyPatch) -> None:
    def drawn(other_seeds: int) -> list[float]:
        monkeypatch.setattr(seeds, "OTHER_SEEDS", other_seeds)
        return [seeds.OtherRandom(seed).random() for seed in (0, 1)]

    first, second = drawn(1), drawn(2)
    assert first == drawn(1)
    assert len({*first, *second}) == 4


def test_it_is_what_tests_draw_from() -> None:
    assert (random.Random is seeds.OtherRandom) is bool(seeds.OTHER_SEEDS)
