"""Actions of ``kv_hints``: which are read, as what, and what becomes of all others."""

import logging
from typing import Any

import pytest

from offload.scheduler import client_values
from offload.scheduler.hints import RequestHints, read_hints
from offload.scheduler.kv_hints import MAX_ACTIONS, KvAction, Wish, wishes
from tests.offload.counted import Counted
from tests.offload.scheduler.test_hints import HOSTILE


@pytest.fixture(autouse=True)
def _never_warned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_values, "_warned", set())


def act(kind: Any, payload: Any, version: Any = "1.0") -> KvAction:
    return KvAction(kind, version, payload)


def read(*actions: KvAction) -> RequestHints:
    return read_hints(None, None, actions)


@pytest.mark.parametrize(
    ("actions", "expected"),
    [
        (
            [act("kv.retain", {"priority": "high", "ttl_seconds": 60})],
            RequestHints(priority="high", ttl_seconds=60),
        ),
        ([act("kv.retain", {"priority": "low"})], RequestHints(priority="low")),
        ([act("kv.retain", {"priority": None, "ttl_seconds": 0.5})], RequestHints(ttl_seconds=0.5)),
        ([act("kv.pin", {"ttl_seconds": 60})], RequestHints(pin_seconds=60)),
        ([act("kv.pin", {"ttl_seconds": 60, "priority": "high"})], RequestHints(pin_seconds=60)),
        ([act("kv.demote", {})], RequestHints(keep=False)),
        ([act("kv.demote", {"ttl_seconds": 60, "priority": "low"})], RequestHints(keep=False)),
        (
            [act("kv.pin", {"ttl_seconds": 9}), act("kv.retain", {"ttl_seconds": 60})],
            RequestHints(pin_seconds=9, ttl_seconds=60),
        ),
        (
            [act("kv.retain", {"ttl_seconds": 9}), act("kv.retain", {"ttl_seconds": 60, "priority": "low"})],
            RequestHints(priority="low", ttl_seconds=9),
        ),
        ([act("kv.demote", {}, version) for version in ("1", "1.0", "1.7.3")], RequestHints(keep=False)),
        ([], RequestHints()),
    ],
    ids=str,
)
def test_what_is_read(
    actions: list[KvAction], expected: RequestHints, caplog: pytest.LogCaptureFixture
) -> None:
    assert read(*actions) == expected
    assert not caplog.records


@pytest.mark.parametrize(
    ("action", "problem"),
    [
        (act("kv.prefetch", {}), "'kv.prefetch' has no effect"),
        (act("kv.fetch", {"block_hashes": [1]}), "'kv.fetch' has no effect"),
        (act("kv.share", {}), "the action str 'kv.share' is unknown; known are kv.retain, kv.pin, kv.demote"),
        (act("KV.PIN", {"ttl_seconds": 1}), "the action str 'KV.PIN' is unknown"),
        (act(None, None, None), "the action NoneType None is unknown"),
        (act("kv.demote", {}, "2.0"), "'kv.demote' has the version str '2.0'; use '1.0'"),
        (act("kv.demote", {}, "10.0"), "'kv.demote' has the version str '10.0'"),
        (act("kv.demote", {}, 1), "'kv.demote' has the version int 1"),
        (act("kv.demote", None), "the payload of 'kv.demote' is NoneType None; use an object"),
        (act("kv.pin", {}), "'kv.pin' without ttl_seconds"),
        (act("kv.pin", {"priority": "high"}), "'kv.pin' without ttl_seconds"),
        (act("kv.retain", {"ttl_seconds": None}), "'kv.retain' without ttl_seconds or priority"),
        (act("kv.demote", {"session_id": "a"}), "'kv.demote' says str 'session_id', which is unknown"),
        (
            act("kv.pin", {"ttl_seconds": 1, "priority": "low", "scope": 1}),
            "says str 'scope', which is unknown",
        ),
        (act("kv.retain", {"priority": 80}), "'kv.retain priority' is int 80; use \"low\""),
        (
            act("kv.retain", {"ttl_seconds": True}),
            "'kv.retain ttl_seconds' is bool True; use a number of seconds",
        ),
        (act("kv.pin", {"ttl_seconds": -1}), "'kv.pin ttl_seconds' is int -1; use a number of seconds"),
    ],
    ids=str,
)
def test_what_is_ignored_draws_one_warning(
    action: KvAction, problem: str, caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(3):
        assert read(action, act("kv.retain", {"priority": "low"})) == RequestHints(priority="low")
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert record.getMessage().startswith("in kv_hints, here and from now on, ignored: ")
    assert problem in record.getMessage()


def test_a_bad_part_of_a_payload_does_not_take_the_good_one_along() -> None:
    assert read(act("kv.retain", {"ttl_seconds": "x", "priority": "low"})) == RequestHints(priority="low")


def test_a_pin_is_a_day_at_most(caplog: pytest.LogCaptureFixture) -> None:
    assert read(act("kv.pin", {"ttl_seconds": 10**6})) == RequestHints(pin_seconds=24 * 3600)
    (record,) = caplog.records
    assert "shortened: 'kv.pin ttl_seconds' is int 1000000; the longest pin is 86400" in record.getMessage()


def test_actions_of_no_kind_we_know_warn_once_however_many_kinds(caplog: pytest.LogCaptureFixture) -> None:
    for number in range(50):
        read(
            act(f"kv.{number}", {}),
            act("kv.demote", {}, f"{number + 2}.0"),
            act("kv.demote", {f"k{number}": 1}),
        )
    assert len(caplog.records) == 3
    assert len(client_values._warned) == 3


def test_so_many_actions_are_looked_at(caplog: pytest.LogCaptureFixture) -> None:
    actions = [act("kv.retain", {"priority": "low"})] * (MAX_ACTIONS - 1)
    last, beyond = act("kv.pin", {"ttl_seconds": 5}), act("kv.demote", {})
    assert read(*actions, last) == RequestHints(priority="low", pin_seconds=5)
    assert not caplog.records
    assert read(*actions, last, beyond) == RequestHints(priority="low", pin_seconds=5)
    (record,) = caplog.records
    assert "all actions of a request after the first 64" in record.getMessage()


def test_no_more_are_looked_at_however_many_there_are() -> None:
    assert len(list(wishes([act("kv.demote", {})] * (3 * MAX_ACTIONS)))) == MAX_ACTIONS


@pytest.mark.parametrize(
    "version", ["1", "1.", "1.0", "1.12.3", "0", "10", "11.0", "01.0", "1-0", " 1.0", "", "v1.0"]
)
def test_versions(version: str) -> None:
    is_one = version.split(".")[0] == "1"
    assert read(act("kv.demote", {}, version)) == RequestHints(keep=not is_one)


def test_a_payload_of_any_size_costs_the_same() -> None:
    payload = Counted({"ttl_seconds": 5, **{f"k{index}": 0 for index in range(100_000)}})
    assert list(wishes([act("kv.pin", payload)])) == []
    assert payload.num_listed <= 3
    assert payload.num_lookups <= 4
    assert list(wishes([act("kv.pin", Counted({"ttl_seconds": 5}))])) == [
        Wish("pin_seconds", 5, "kv.pin ttl_seconds")
    ]


@pytest.mark.parametrize("value", HOSTILE.values(), ids=HOSTILE)
@pytest.mark.parametrize("place", ["action", "version", "payload", "key", "ttl_seconds", "priority"])
def test_no_value_of_a_client_raises_or_fills_the_log(
    place: str, value: Any, caplog: pytest.LogCaptureFixture
) -> None:
    hostile = {
        "action": act(value, {}),
        "version": act("kv.demote", {}, value),
        "payload": act("kv.demote", value),
        "key": act("kv.demote", {value if isinstance(value, str) else str(type(value)): 1}),
    }
    action = hostile.get(place) or act("kv.retain", {place: value})
    assert read(action) == RequestHints()
    (record,) = caplog.records
    assert record.getMessage().isprintable()
    assert len(record.getMessage()) < 300
