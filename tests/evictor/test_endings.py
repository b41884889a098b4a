"""Classes of endings: frequent ones have their own, whatever they are called."""

from hypothesis import given
from hypothesis import strategies as st

from evictor.endings import OTHERS, Endings


@given(st.lists(st.integers(0, 90), max_size=400))
def test_classes_are_bounded_whatever_comes(endings: list[int]) -> None:
    classes = Endings()
    for each in endings:
        assert 1 <= classes.class_of(each) <= OTHERS
        classes.check_invariants()


def test_an_ending_keeps_its_class_while_it_is_frequent() -> None:
    classes = Endings()
    tool = classes.class_of("tool")
    seen = {classes.class_of("tool" if turn % 2 else f"rare {turn}") for turn in range(10_000) if turn % 2}
    assert seen == {tool}
    classes.check_invariants()


def test_a_frequent_ending_gets_a_class_of_rare_ones_that_came_before() -> None:
    classes = Endings()
    for turn in range(100):
        classes.class_of(f"rare {turn}")
    late = [classes.class_of("tool") for _ in range(20)]
    assert late[0] == OTHERS
    assert late[-1] != OTHERS
    assert classes.class_of("rare 1000") == OTHERS


def test_rare_endings_have_one_class() -> None:
    classes = Endings()
    for turn in range(OTHERS - 1):
        for _ in range(100):
            classes.class_of(turn)
    assert {classes.class_of(f"rare {turn}") for turn in range(200)} == {OTHERS}
    assert len({classes.class_of(turn) for turn in range(OTHERS - 1)}) == OTHERS - 1


def test_what_was_frequent_long_ago_gives_way() -> None:
    classes = Endings()
    for turn in range(OTHERS - 1):
        for _ in range(500):
            classes.class_of(turn)
    assert classes.class_of("new") == OTHERS
    for _ in range(8 * 4096):
        classes.class_of("new")
    assert classes.class_of("new") != OTHERS
