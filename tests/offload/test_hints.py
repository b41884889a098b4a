"""Per-request parameters: ours are read, malformed ones ignored with one warning per kind."""

import logging
import math
from typing import Any

import pytest

from evictor import KeepHints, Worth
from offload import hints
from offload.hints import LONGEST_PIN, RequestHints, read_hints


@pytest.fixture(autouse=True)
def _never_warned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hints, "_warned", set())


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (None, RequestHints()),
        ({}, RequestHints()),
        ({"cpu_offload_store": False}, RequestHints(store=False)),
        ({"cpu_offload_load": False}, RequestHints(load=False)),
        ({"cpu_offload_load": False, "cpu_offload_store": False}, RequestHints(store=False, load=False)),
        ({"cpu_offload_load": True, "cpu_offload_store": True}, RequestHints()),
        ({"cpu_offload_priority": "low"}, RequestHints(priority="low")),
        ({"cpu_offload_priority": "normal", "cpu_offload_keep": True}, RequestHints()),
        (
            {"cpu_offload_priority": "high", "cpu_offload_keep": False},
            RequestHints(priority="high", keep=False),
        ),
        ({"cpu_offload_ttl_seconds": 90}, RequestHints(ttl_seconds=90)),
        ({"cpu_offload_pin_seconds": 0.5}, RequestHints(pin_seconds=0.5)),
        ({"cpu_offload_pin_seconds": LONGEST_PIN}, RequestHints(pin_seconds=86400)),
        ({"do_remote_prefill": "yes", 7: False, "store": False, "load": 3}, RequestHints()),
        ({"do_remote_prefill": True, "cpu_offload_store": False}, RequestHints(store=False)),
    ],
)
def test_what_is_well_formed_or_foreign_draws_no_warning(
    params: Any, expected: RequestHints, caplog: pytest.LogCaptureFixture
) -> None:
    before = None if params is None else dict(params)
    assert read_hints(params) == expected
    assert params == before
    assert caplog.records == []


@pytest.mark.parametrize("value", ["false", 0, 1, None, [False], {}, 0.0])
@pytest.mark.parametrize("name", ["store", "load", "keep"])
def test_a_value_that_is_no_boolean_is_ignored(
    name: str, value: Any, caplog: pytest.LogCaptureFixture
) -> None:
    key = f"cpu_offload_{name}"
    assert read_hints({key: value}) == RequestHints()
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert f"{key!r} is {value!r}; use true or false" in record.getMessage()


@pytest.mark.parametrize("value", ["urgent", "HIGH", 1, True, None, ["low"], {}])
def test_a_priority_is_one_of_three_words(value: Any, caplog: pytest.LogCaptureFixture) -> None:
    assert read_hints({"cpu_offload_priority": value}) == RequestHints()
    (record,) = caplog.records
    assert f"""'cpu_offload_priority' is {value!r}; use "low", "normal", "high\"""" in record.getMessage()


@pytest.mark.parametrize(
    "value", ["60", True, None, 0, -1, 0.0, math.nan, math.inf, -math.inf, 10**400, [60]]
)
@pytest.mark.parametrize("name", ["ttl_seconds", "pin_seconds"])
def test_a_duration_is_a_number_above_zero(name: str, value: Any, caplog: pytest.LogCaptureFixture) -> None:
    key = f"cpu_offload_{name}"
    assert read_hints({key: value}) == RequestHints()
    (record,) = caplog.records
    assert f"{key!r} is {value!r}; use a number of seconds above 0" in record.getMessage()


def test_a_pin_is_a_day_at_most(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        assert read_hints({"cpu_offload_pin_seconds": 10**6}) == RequestHints(pin_seconds=24 * 3600)
    (record,) = caplog.records
    assert "shortened: 'cpu_offload_pin_seconds' is 1000000; the longest pin is 86400" in record.getMessage()


@pytest.mark.parametrize(
    ("hints", "keep"),
    [
        (RequestHints(), None),
        (RequestHints(store=False, load=False), None),
        (RequestHints(priority="low"), KeepHints(Worth.LOW)),
        (RequestHints(priority="high", pin_seconds=7), KeepHints(Worth.HIGH, pinned_until=107)),
        (RequestHints(ttl_seconds=7), KeepHints(ttl=7)),
        (RequestHints(keep=False, priority="high", pin_seconds=7, ttl_seconds=7), KeepHints(Worth.UNWANTED)),
    ],
    ids=str,
)
def test_what_the_pool_is_told(hints: RequestHints, keep: KeepHints | None) -> None:
    assert hints.to_keep(100.0) == keep


def test_an_unknown_key_of_ours_is_ignored(caplog: pytest.LogCaptureFixture) -> None:
    assert read_hints({"cpu_offload_stor": False}) == RequestHints()
    (record,) = caplog.records
    assert "'cpu_offload_stor' is unknown" in record.getMessage()
    assert "known are cpu_offload_store, cpu_offload_load" in record.getMessage()


def test_a_bad_hint_does_not_take_the_good_one_along() -> None:
    assert read_hints({"cpu_offload_store": "no", "cpu_offload_load": False}) == RequestHints(load=False)


def test_each_kind_warns_once(caplog: pytest.LogCaptureFixture) -> None:
    for number in range(5):
        read_hints({"cpu_offload_store": number})
        read_hints({"cpu_offload_load": str(number)})
        read_hints({f"cpu_offload_{number}": True})
    assert len(caplog.records) == 3


@pytest.mark.parametrize("params", ["cpu_offload_store", ["cpu_offload_store"], 7, object()])
def test_what_is_no_mapping_is_ignored(params: Any, caplog: pytest.LogCaptureFixture) -> None:
    assert read_hints(params) == read_hints(params) == RequestHints()
    (record,) = caplog.records
    assert f"{params!r} is not an object" in record.getMessage()
