"""Per-request parameters: ours are read, malformed ones ignored with one warning per kind."""

import logging
import math
from dataclasses import fields
from typing import Any

import pytest

from allocator import CpuOffloadingBlockAllocator
from evictor import HintedPolicy, KeepHints, LruPolicy, Worth
from offload.scheduler import client_values
from offload.scheduler.amounts import loadable_tokens
from offload.scheduler.hints import LONGEST_PIN, MAX_OTHER_KEYS, RequestHints, read_hints
from tests.offload.counted import Counted
from tests.strategies import chain_of


@pytest.fixture(autouse=True)
def _never_warned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_values, "_warned", set())


COUNTS = ["max_load_tokens", "max_offload_tokens"]
KEYS = {field.name: f"cpu_offload_{field.name}" for field in fields(RequestHints)} | {
    name: name for name in COUNTS
}


def quoted(value: object) -> str:
    """What a warning says of a short value: its type, and its text if that is one line without question."""
    kind = type(value).__name__
    if isinstance(value, str):
        return f"{kind} {value!r}"
    if isinstance(value, int) and abs(value) >= 1 << 256:
        return f"{kind} of {value.bit_length()} bits"
    return f"{kind} {value}" if value is None or isinstance(value, bool | int | float) else kind


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (None, RequestHints()),
        ({}, RequestHints()),
        ({"cpu_offload_store": False}, RequestHints(store=False)),
        ({"cpu_offload_load": False}, RequestHints(load=False)),
        ({"cpu_offload_load": False, "cpu_offload_store": False}, RequestHints(store=False, load=False)),
        ({"cpu_offload_load": True, "cpu_offload_store": True}, RequestHints(load=True)),
        ({"cpu_offload_priority": "low"}, RequestHints(priority="low")),
        ({"cpu_offload_priority": "normal", "cpu_offload_keep": True}, RequestHints()),
        (
            {"cpu_offload_priority": "high", "cpu_offload_keep": False},
            RequestHints(priority="high", keep=False),
        ),
        ({"cpu_offload_ttl_seconds": 90}, RequestHints(ttl_seconds=90)),
        ({"cpu_offload_pin_seconds": 0.5}, RequestHints(pin_seconds=0.5)),
        ({"cpu_offload_pin_seconds": LONGEST_PIN}, RequestHints(pin_seconds=86400)),
        (
            {"max_load_tokens": 0, "max_offload_tokens": 2**63},
            RequestHints(max_load_tokens=0, max_offload_tokens=2**63),
        ),
        ({"max_load_tokens": None, "max_offload_tokens": None}, RequestHints()),
        ({"max_load_token": 1, "max_tokens": "x"}, RequestHints()),
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
    assert f"{key!r} is {quoted(value)}; use true or false" in record.getMessage()


@pytest.mark.parametrize("value", ["64", True, False, 64.0, -1, [64], {}, math.nan])
@pytest.mark.parametrize("name", COUNTS)
def test_a_count_is_a_whole_number(name: str, value: Any, caplog: pytest.LogCaptureFixture) -> None:
    assert read_hints({name: value}) == RequestHints()
    (record,) = caplog.records
    assert f"{name!r} is {quoted(value)}; use a whole number of tokens, 0 or more" in record.getMessage()


@pytest.mark.parametrize(
    ("hints", "may_load", "may_store"),
    [
        (RequestHints(), True, True),
        (RequestHints(load=False, store=False), False, False),
        (RequestHints(max_load_tokens=15, max_offload_tokens=16), False, True),
        (RequestHints(max_load_tokens=16, max_offload_tokens=15), True, False),
        (RequestHints(load=False, max_load_tokens=99, store=False, max_offload_tokens=99), False, False),
    ],
    ids=str,
)
def test_less_than_a_block_is_nothing(hints: RequestHints, may_load: bool, may_store: bool) -> None:
    assert (hints.may_load(16), hints.may_store(16)) == (may_load, may_store)


@pytest.mark.parametrize("most", range(20))
def test_something_may_be_loaded_if_a_block_may(most: int) -> None:
    hints = read_hints({"max_load_tokens": most})
    assert hints.may_load(8) == (loadable_tokens(9, 16, 100, 8, hints.max_load_tokens) > 0)


@pytest.mark.parametrize("value", ["urgent", "HIGH", 1, True, None, ["low"], {}])
def test_a_priority_is_one_of_three_words(value: Any, caplog: pytest.LogCaptureFixture) -> None:
    assert read_hints({"cpu_offload_priority": value}) == RequestHints()
    (record,) = caplog.records
    problem = f"""'cpu_offload_priority' is {quoted(value)}; use "low", "normal", "high\""""
    assert problem in record.getMessage()


@pytest.mark.parametrize(
    "value", ["60", True, None, 0, -1, 0.0, math.nan, math.inf, -math.inf, 10**400, [60]]
)
@pytest.mark.parametrize("name", ["ttl_seconds", "pin_seconds"])
def test_a_duration_is_a_number_above_zero(name: str, value: Any, caplog: pytest.LogCaptureFixture) -> None:
    key = f"cpu_offload_{name}"
    assert read_hints({key: value}) == RequestHints()
    (record,) = caplog.records
    assert f"{key!r} is {quoted(value)}; use a number of seconds above 0" in record.getMessage()


def test_a_pin_is_a_day_at_most(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        assert read_hints({"cpu_offload_pin_seconds": 10**6}) == RequestHints(pin_seconds=24 * 3600)
    (record,) = caplog.records
    assert (
        "shortened: 'cpu_offload_pin_seconds' is int 1000000; the longest pin is 86400" in record.getMessage()
    )


@pytest.mark.parametrize(
    ("hints", "keep"),
    [
        (RequestHints(), None),
        (RequestHints(store=False, load=False), None),
        (RequestHints(priority="low"), KeepHints(Worth.LOW)),
        (RequestHints(priority="high", pin_seconds=7), KeepHints(Worth.HIGH, pinned_until=107)),
        (RequestHints(ttl_seconds=7), KeepHints(ttl=7)),
        (RequestHints(pin_seconds=7), KeepHints(pinned_until=107)),
        (RequestHints(keep=False, priority="high", pin_seconds=7, ttl_seconds=7), KeepHints(Worth.UNWANTED)),
    ],
    ids=str,
)
def test_what_the_pool_is_told(hints: RequestHints, keep: KeepHints | None) -> None:
    assert hints.to_keep(100.0) == keep


def test_a_pin_lasts_from_the_start_of_its_request() -> None:
    now = 1000.0
    pool = CpuOffloadingBlockAllocator(2, policy=HintedPolicy(LruPolicy(), 2, lambda: now))
    chain, other = chain_of(1, 2), chain_of(3, 4)

    def store(chain: list[bytes], params: dict[str, Any]) -> int:
        plan = pool.plan_store(chain, 2, hints=read_hints(params).to_keep(now))
        if plan is not None:
            pool.commit(plan)
        return pool.resident_depth(chain)

    assert store(chain, {"cpu_offload_pin_seconds": 7}) == 2
    now = 1006.9
    assert (store(other, {}), pool.resident_depth(chain)) == (0, 2)
    now = 1007.0
    assert (store(other, {}), pool.resident_depth(chain)) == (2, 0)


def test_a_time_that_the_pool_is_told_is_above_zero_and_has_an_end() -> None:
    values = [False, True, -1, 0, -0.0, 1e-9, 1, 2.5, 10**9, 1e9 + 1, 10**400, math.nan, math.inf, "1", None]
    accepted = [1e-9, 1, 2.5, 10**9]
    for value in values:
        hints = read_hints({"cpu_offload_ttl_seconds": value, "cpu_offload_pin_seconds": value})
        is_accepted = type(value) in (int, float) and value in accepted
        assert hints.ttl_seconds == (value if is_accepted else None), value
        assert hints.pin_seconds == (min(value, LONGEST_PIN) if is_accepted else None), value


def test_an_unknown_key_of_ours_is_ignored(caplog: pytest.LogCaptureFixture) -> None:
    assert read_hints({"cpu_offload_stor": False}) == RequestHints()
    (record,) = caplog.records
    assert "str 'cpu_offload_stor' is unknown" in record.getMessage()
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
    assert f"{quoted(params)} is not an object" in record.getMessage()


@pytest.mark.parametrize("prefix", ["k", "cpu_offload_"])
def test_any_number_of_keys_costs_the_same(prefix: str) -> None:
    num_known = len(fields(RequestHints))
    others: dict[str, Any] = {f"{prefix}{index}": 0 for index in range(100_000)}
    params = Counted({**others, "cpu_offload_load": False})
    assert read_hints(params) == RequestHints(load=False), "a known key is found wherever it is"
    assert params.num_lookups == num_known
    assert params.num_listed <= MAX_OTHER_KEYS
    known: dict[str, Any] = dict.fromkeys(KEYS.values(), 0)
    params = Counted({**known, **others})
    read_hints(params)
    assert params.num_lookups == num_known
    assert params.num_listed <= num_known + MAX_OTHER_KEYS


@pytest.mark.parametrize("num_before", [0, MAX_OTHER_KEYS - 1])
def test_a_misspelt_key_is_found_among_others(num_before: int, caplog: pytest.LogCaptureFixture) -> None:
    before = {f"other {index}": 0 for index in range(num_before)}
    params = {"cpu_offload_load": True, **before, "cpu_offload_stor": False, "cpu_offload_keeep": False}
    for _ in range(2):
        assert read_hints(params) == RequestHints(load=True)
    (record,) = caplog.records
    assert "'cpu_offload_stor' is unknown" in record.getMessage()


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


class Unprintable:
    """Whoever asks for all of its text has lost."""

    def __repr__(self) -> str:
        raise AssertionError("a client's value was written out")

    __str__ = __repr__


HOSTILE: dict[str, Any] = {
    "deep": nested(100_000),
    "long list": [Unprintable()] * 1000,
    "object": {"a": Unprintable()},
    "huge integer": 10**5000,
    "huge negative integer": -(10**5000),
    "long text": "x" * 10**6,
    "lines": "\nWARNING all is well\r\x1b[2J\u2028" * 100,
    "half a character": "\ud800" * 100,
    "unprintable": Unprintable(),
}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        pytest.param(name, value, id=f"{name}-{what}")
        for name in KEYS
        for what, value in HOSTILE.items()
        if (name in COUNTS, what) != (True, "huge integer")
    ],
)
def test_no_value_of_a_client_raises_or_fills_the_log(
    name: str, value: Any, caplog: pytest.LogCaptureFixture
) -> None:
    assert read_hints({KEYS[name]: value}) == RequestHints()
    (record,) = caplog.records
    message = record.getMessage()
    assert type(value).__name__ in message
    assert message.isprintable()
    assert len(message) < 300


@pytest.mark.parametrize(
    "key", ["cpu_offload_" + "x" * 10**6, "cpu_offload_\nWARNING all is well", "cpu_offload_\ud800" * 50]
)
def test_no_key_of_a_client_raises_or_fills_the_log(key: str, caplog: pytest.LogCaptureFixture) -> None:
    assert read_hints({key: 1, "cpu_offload_store": False}) == RequestHints(store=False)
    (record,) = caplog.records
    assert "str 'cpu_offload_" in record.getMessage()
    assert record.getMessage().isprintable()
    assert len(record.getMessage()) < 400


@pytest.mark.parametrize("params", [nested(100_000), 10**5000, "x" * 10**6, Unprintable()], ids=type)
def test_no_object_of_a_client_raises_or_fills_the_log(params: Any, caplog: pytest.LogCaptureFixture) -> None:
    assert read_hints(params) == RequestHints()
    (record,) = caplog.records
    assert record.getMessage().isprintable()
    assert len(record.getMessage()) < 300
