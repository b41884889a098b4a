"""Per-request parameters: ours are read, malformed ones ignored with one warning per kind."""

import logging
from typing import Any

import pytest

from offload import hints
from offload.hints import RequestHints, read_hints


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
@pytest.mark.parametrize("name", ["store", "load"])
def test_a_value_that_is_no_boolean_is_ignored(
    name: str, value: Any, caplog: pytest.LogCaptureFixture
) -> None:
    key = f"cpu_offload_{name}"
    assert read_hints({key: value}) == RequestHints()
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert f"{key!r} is {value!r}; use true or false" in record.getMessage()


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
