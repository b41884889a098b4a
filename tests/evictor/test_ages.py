"""Books by turn count ages in seconds, the others in ticks."""

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from evictor.ages import NUM_AGES, NUM_STEPS, Ages
from evictor.kinds import books_of, with_ending, with_turn
from evictor.moments import Moments
from evictor.reuse import ReuseStatistics

KIND = with_ending(with_turn(0, 1, 1), 2)
"""A position whose chain had a turn before, and whose answer has ended."""


@given(st.floats(0.1, 1e6), st.floats(0, 1e12))
def test_each_age_is_of_the_class_that_begins_before_it(first: float, age: float) -> None:
    ages = Ages(first)
    assert len(ages.starts) == len(ages.widths) == NUM_AGES
    [found] = ages.classes_of(np.array([age])).tolist()
    assert ages.starts[found] <= age
    assert found == NUM_AGES - 1 or age < ages.starts[found + 1]


@given(st.floats(0, 1e6))
def test_each_step_of_a_class_has_its_own_value(age: float) -> None:
    ages, index = Ages(4.0), [each / NUM_STEPS for each in range(NUM_AGES * NUM_STEPS + 1)]
    value, change = ages.at(index, age)
    assert change > age
    assert ages.at(index, np.nextafter(change, 0.0)) == (value, change)
    [found] = ages.classes_of(np.array([age])).tolist()
    assert found <= value < found + 1


@given(st.lists(st.tuples(st.integers(1, 9), st.floats(0, 9)), min_size=1, max_size=60))
def test_moments_of_many_ticks_are_those_of_each(steps: list[tuple[int, float]]) -> None:
    moments, tick, seconds = Moments(), 0, 0.0
    for more, passed in steps:
        tick, seconds = tick + more, seconds + passed
        moments.add(tick, seconds)
    asked = np.arange(-1, tick + 2)
    assert moments.all_at(asked).tolist() == [moments.at(each) for each in asked.tolist()]
    reached = [(each, moments.at(each)) for each in moments._ticks]
    whens = np.array([-1.0, seconds / 2, seconds, seconds + 1])
    expected = [max((each for each, at in reached if at <= when), default=-1) for when in whens.tolist()]
    assert moments.ticks_at(whens).tolist() == expected


def test_a_clock_that_goes_back_stands_still() -> None:
    moments = Moments()
    for tick, seconds in enumerate((5.0, 3.0, 6.0)):
        moments.add(tick, seconds)
    moments.check_invariants()
    assert [moments.at(tick) for tick in range(3)] == [5.0, 5.0, 6.0]


def test_ticks_a_second_are_those_of_late() -> None:
    moments = Moments()
    moments.add(0, 0.0)
    assert moments.ticks_per_second(10) == 1
    for second in range(1, 11):
        moments.add(2 * second, float(second))
    for second in range(11, 21):
        moments.add(20 + 8 * (second - 10), float(second))
    assert moments.ticks_per_second(10) == 8
    assert moments.ticks_per_second(20) == 5


def requests(reuse: ReuseStatistics, num: int, ticks: int, seconds: float) -> Iterator[int]:
    """Each of so many ticks, so many seconds after the one before. Yields the tick."""
    for _ in range(num):
        reuse.request(ticks, reuse.moments.at(reuse.tick) + seconds)
        yield reuse.tick


@pytest.mark.parametrize("ticks", [3, 900])
def test_hits_are_counted_by_seconds_where_turns_are_known(ticks: int) -> None:
    """Each position is asked for again after two requests, which are six seconds."""
    reuse, began = ReuseStatistics(1000), [0]
    for tick in requests(reuse, 50, ticks, 3.0):
        if len(began) > 2:
            reuse.hit(KIND, began[-2], 1)
        reuse.begin(KIND, 1)
        began.append(tick)
    reuse.learn()
    base, *by_turn = books_of(KIND)
    [in_seconds] = Ages(1.0).classes_of(np.array([6.0])).tolist()
    [in_ticks] = Ages(125.0).classes_of(np.array([2 * ticks])).tolist()
    assert in_seconds != in_ticks
    assert np.argmax(reuse._hits[base]) == in_ticks
    for book in by_turn:
        assert np.flatnonzero(reuse._hits[book]).tolist() == [in_seconds]


def test_episodes_under_way_are_at_risk_in_seconds() -> None:
    """One begins every second, and none of them ends."""
    reuse = ReuseStatistics(1000)
    for _ in requests(reuse, 100, 7, 1.0):
        reuse.begin(with_turn(0, 1, 1), 1)
        reuse._take_in_news()
    at_risk = reuse._at_risk(reuse.tick)[books_of(with_turn(0, 1, 1))[1]]
    starts = Ages(1.0).starts
    for low, high, found in zip(starts, [*starts[1:], np.inf], at_risk, strict=True):
        by_one = sum(1.0 if age >= high else 0.5 for age in range(100) if age >= low)
        assert found == pytest.approx(by_one, abs=1)


def test_what_a_slot_earns_in_a_second_does_not_depend_on_the_load() -> None:
    """The same turns among requests of 10 and of 50 ticks: in a tick it is a fifth."""
    values = []
    for ticks in (10, 50):
        reuse = ReuseStatistics(1000)
        for tick in requests(reuse, 300, ticks, 2.0):
            reuse.begin(KIND, ticks)
            reuse.hit(KIND, max(0, tick - 2 * ticks), ticks)
        reuse.learn()
        book = books_of(KIND)[-1]
        assert reuse.book_of(KIND) != book, "turns are heeded, and have foretold nothing"
        assert reuse._is_known[book]
        value, change = reuse.value(book, reuse.tick - 2 * ticks)
        values.append(value)
        until = (change - reuse.tick) / ticks * 2
        assert 0 < until <= 4
    assert values[0] == pytest.approx(5 * values[1])


def test_what_is_known_of_turns_outlives_a_pool_that_is_smaller_than_a_request() -> None:
    reuse = ReuseStatistics(10)
    for tick in requests(reuse, 10, 20, 1.0):
        reuse.begin(KIND, 20)
        reuse.hit(KIND, tick - 20, 20)
    reuse.learn()
    base, *by_turn = books_of(KIND)
    before = reuse._hits.sum(axis=1)
    for _ in requests(reuse, 400, 20, 1.0):
        pass
    reuse.learn()
    kept = reuse._hits.sum(axis=1)
    assert kept[base] < 0.01 * before[base]
    assert all(kept[book] > 0.8 * before[book] for book in by_turn)


def test_a_small_pool_tells_endings_apart_long_after_it_saw_them() -> None:
    """After one ending the chain goes on in two seconds, after the other nobody has seen it go on by then."""
    reuse, other = ReuseStatistics(10), with_ending(with_turn(0, 1, 1), 3)
    for tick in requests(reuse, 100, 20, 1.0):
        reuse.begin(KIND, 20)
        reuse.begin(other, 20)
        if tick > 40:
            reuse.hit(KIND, tick - 40, 20)
            reuse.forgotten(other, tick - 40, 20)
    for _ in requests(reuse, 400, 20, 1.0):
        reuse.learn()
    reuse.book_of(KIND)
    soon, never = (reuse.value(books_of(each)[-1], reuse.tick)[0] for each in (KIND, other))
    assert soon > 3 * never


def test_ticks_and_seconds_agree_where_the_load_is_even() -> None:
    """Nine in ten positions are asked for after 40 requests, 8,000 ticks or 4 seconds."""
    reuse = ReuseStatistics(8000)
    for tick in requests(reuse, 1000, 200, 0.1):
        reuse.begin(KIND, 200)
        if tick > 8000:
            reuse.hit(KIND, tick - 8000, 180)
    reuse.learn()
    reuse.book_of(KIND)
    in_ticks, *in_seconds = (reuse.value(book, reuse.tick)[0] for book in books_of(KIND))
    for value in in_seconds:
        assert 0.5 < value / in_ticks < 2


def test_an_index_is_made_when_a_value_is_asked_for() -> None:
    """A book is told without one. It is of what was learned, also where more has happened since."""
    values = []
    for num_since in (0, 1000):
        reuse = ReuseStatistics(1000)
        for tick in requests(reuse, 30, 10, 2.0):
            reuse.begin(KIND, 10)
            reuse.hit(KIND, max(0, tick - 20), 10)
        reuse.learn()
        book = reuse.book_of(KIND)
        assert not reuse._has_index
        if num_since:
            reuse.hit(KIND, reuse.tick - 10, num_since)
        values.append(reuse.value(book, reuse.tick - 20))
        assert reuse._has_index
    assert values[0] == values[1]
    reuse.learn()
    assert not reuse._has_index
    assert reuse.value(book, reuse.tick - 20) != values[1]
