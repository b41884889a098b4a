"""The stopwatch adds up calls by label, and takes off its own share if asked to."""

from itertools import count
from types import SimpleNamespace

import pytest

from benchmarks.common.stopwatch import Stopwatch


@pytest.mark.parametrize(("less_own", "each"), [(False, 10), (True, 0)])
def test_calls_are_added_up(less_own: bool, each: int) -> None:
    ticks = count(step=10)
    stopwatch = Stopwatch(lambda: next(ticks), less_own=less_own)
    owner = SimpleNamespace(double=lambda value: 2 * value, half=lambda *, value: value / 2, other=print)
    stopwatch.watch(owner, {"double": "a", "half": "b"})
    assert [owner.double(4), owner.half(value=4), owner.double(1)] == [8, 2, 2]
    assert stopwatch.take() == {"a": 2 * each, "b": each}
    assert stopwatch.take() == {} and owner.other is print
