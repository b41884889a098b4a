"""One hint in several places of a request: which of them counts, and what is read in each."""

from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.scheduler import client_values
from offload.scheduler.hints import LONGEST_PIN, MAX_OTHER_KEYS, RequestHints, read_hints
from offload.scheduler.kv_hints import KvAction
from tests.offload.counted import Counted
from tests.strategies import thorough


@pytest.fixture(autouse=True)
def _never_warned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_values, "_warned", set())


def retain(**payload: Any) -> KvAction:
    return KvAction("kv.retain", "1.0", payload)


class TestXargs:
    @pytest.mark.parametrize(
        ("xargs", "expected"),
        [
            ({"cpu_offload_store": 0, "cpu_offload_load": 1}, RequestHints(store=False, load=True)),
            ({"cpu_offload_store": 1, "cpu_offload_load": 0}, RequestHints(load=False)),
            ({"cpu_offload_keep": 0}, RequestHints(keep=False)),
            ({"cpu_offload_keep": False, "cpu_offload_store": True}, RequestHints(keep=False)),
            ({"cpu_offload_priority": "low"}, RequestHints(priority="low")),
            (
                {"cpu_offload_ttl_seconds": 1, "cpu_offload_pin_seconds": 0.5},
                RequestHints(ttl_seconds=1, pin_seconds=0.5),
            ),
            ({"kv_transfer_params": {"cpu_offload_store": False}, "session_id": "a"}, RequestHints()),
        ],
        ids=str,
    )
    def test_our_keys_are_read(
        self, xargs: dict[str, Any], expected: RequestHints, caplog: pytest.LogCaptureFixture
    ) -> None:
        """vLLM turns true and false into 1 and 0 there."""
        assert read_hints(None, xargs) == expected
        assert not caplog.records

    @pytest.mark.parametrize("value", [2, -1, 0.0, 1.0, "false", None, [0]])
    def test_only_one_and_zero_are_booleans(self, value: Any, caplog: pytest.LogCaptureFixture) -> None:
        assert read_hints(None, {"cpu_offload_store": value}) == RequestHints()
        (record,) = caplog.records
        assert record.getMessage().startswith(
            "in vllm_xargs, here and from now on, ignored: 'cpu_offload_store'"
        )

    def test_numbers_are_no_booleans_elsewhere(self, caplog: pytest.LogCaptureFixture) -> None:
        assert read_hints({"cpu_offload_store": 0}, {"cpu_offload_load": 0}) == RequestHints(load=False)
        (record,) = caplog.records
        assert record.getMessage().startswith("in kv_transfer_params, ")

    def test_vllms_own_keys_are_not_read_there(self, caplog: pytest.LogCaptureFixture) -> None:
        """Nor does vLLM."""
        assert read_hints(None, {"max_load_tokens": 1, "max_offload_tokens": -1}) == RequestHints()
        assert not caplog.records

    def test_a_misspelt_key_is_found(self, caplog: pytest.LogCaptureFixture) -> None:
        for _ in range(2):
            assert read_hints(None, {"kv_transfer_params": {}, "cpu_offload_stor": 0}) == RequestHints()
        (record,) = caplog.records
        assert "in vllm_xargs" in record.getMessage()
        assert "'cpu_offload_stor' is unknown" in record.getMessage()

    def test_any_number_of_keys_costs_the_same(self) -> None:
        xargs = Counted({**{f"cpu_offload_{index}": 0 for index in range(100_000)}, "cpu_offload_load": 0})
        assert read_hints(None, xargs) == RequestHints(load=False)
        assert xargs.num_lookups == 7
        assert xargs.num_listed <= MAX_OTHER_KEYS

    @pytest.mark.parametrize("xargs", ["cpu_offload_store", [1], 7])
    def test_what_is_no_mapping_is_ignored(self, xargs: Any, caplog: pytest.LogCaptureFixture) -> None:
        assert read_hints({"cpu_offload_store": False}, xargs) == RequestHints(store=False)
        (record,) = caplog.records
        assert "in vllm_xargs" in record.getMessage()


class TestPrecedence:
    def test_params_then_xargs_then_hints(self) -> None:
        params, xargs = {"cpu_offload_priority": "low"}, {"cpu_offload_priority": "normal"}
        actions = [retain(priority="high")]
        assert read_hints(params, xargs, actions).priority == "low"
        assert read_hints({}, xargs, actions).priority == "normal"
        assert read_hints(None, {}, actions).priority == "high"

    def test_by_key(self) -> None:
        hints = read_hints(
            {"cpu_offload_load": False},
            {"cpu_offload_load": 1, "cpu_offload_priority": "low"},
            [retain(priority="high", ttl_seconds=5)],
        )
        assert hints == RequestHints(load=False, priority="low", ttl_seconds=5)

    def test_a_wrong_value_leaves_the_word_to_the_next(self) -> None:
        actions = [retain(ttl_seconds=7)]
        hints = read_hints({"cpu_offload_ttl_seconds": "5"}, {"cpu_offload_ttl_seconds": -1}, actions)
        assert hints == RequestHints(ttl_seconds=7)

    def test_a_default_said_first_counts(self) -> None:
        assert read_hints({"cpu_offload_keep": True}, {"cpu_offload_keep": 0}) == RequestHints()
        demoted = [KvAction("kv.demote", "1.0", {})]
        assert read_hints(None, {"cpu_offload_keep": 1}, demoted) == RequestHints()


VALUES = st.sampled_from(
    [True, False, 0, 1, -1, 2.5, 10**6, 2**70, 0.0, float("nan"), "low", "high", "normal", "", None, [1], {}]
)
KEYS = [
    f"cpu_offload_{name}"
    for name in ("store", "load", "priority", "ttl_seconds", "keep", "pin_seconds", "report")
]
MAPPINGS = st.dictionaries(
    st.sampled_from([*KEYS, "max_load_tokens", "max_offload_tokens", "cpu_offload_x", "other", 7]),
    VALUES,
    max_size=7,
)
ACTIONS = st.lists(
    st.builds(
        KvAction,
        st.sampled_from(["kv.retain", "kv.pin", "kv.demote", "kv.prefetch", "kv.fetch", "kv.x", "", None, 7]),
        st.sampled_from(["1.0", "1", "1.9.3", "10.0", "2.0", "0.1", "", 1, None]),
        st.one_of(
            st.dictionaries(st.sampled_from(["ttl_seconds", "priority", "session"]), VALUES, max_size=3),
            VALUES,
        ),
    ),
    max_size=4,
)


def expected_of(params: Any, xargs: Any, actions: list[KvAction]) -> RequestHints:
    """Slow and obvious: the first of all that a request says about a hint which has a value it can have."""
    said: list[tuple[str, Any]] = [
        (key.removeprefix("cpu_offload_"), params[key]) for key in params if key in KEYS
    ]
    said += [(key, params[key]) for key in params if key in ("max_load_tokens", "max_offload_tokens")]
    for key in xargs:
        if key in KEYS:
            name, value = key.removeprefix("cpu_offload_"), xargs[key]
            if name in ("store", "load", "keep", "report") and type(value) is int and value in (0, 1):
                value = value == 1
            said.append((name, value))
    for kind, version, payload in actions:
        if version not in ("1.0", "1", "1.9.3") or not isinstance(payload, Mapping) or "session" in payload:
            continue
        if kind == "kv.demote":
            said.append(("keep", False))
        elif kind == "kv.pin":
            said.append(("pin_seconds", payload.get("ttl_seconds")))
        elif kind == "kv.retain":
            said += [(name, payload.get(name)) for name in ("ttl_seconds", "priority")]
    found: dict[str, Any] = {}
    for name, value in said:
        if is_possible(name, value):
            found.setdefault(name, min(value, LONGEST_PIN) if name == "pin_seconds" else value)
    return RequestHints(**found)


def is_possible(name: str, value: Any) -> bool:
    if name in ("store", "load", "keep", "report"):
        return value is True or value is False
    if name == "priority":
        return value in ("low", "normal", "high")
    if name.endswith("seconds"):
        return type(value) in (int, float) and 0 < value <= 10**9
    return type(value) is int and value >= 0


@given(params=MAPPINGS, xargs=MAPPINGS, actions=ACTIONS)
@thorough(600)
def test_whatever_is_said_the_first_possible_value_counts(
    params: dict[Any, Any], xargs: dict[Any, Any], actions: list[KvAction]
) -> None:
    expected = expected_of(params, xargs, actions)
    assert read_hints(params, xargs, actions) == expected
    assert all(is_possible(name, value) or value is None for name, value in asdict(expected).items())


SAYABLE: Any = st.recursive(
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=20)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=8), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(
    params=st.one_of(SAYABLE, st.dictionaries(st.sampled_from(KEYS), SAYABLE)),
    xargs=st.one_of(SAYABLE, st.dictionaries(st.sampled_from(KEYS), SAYABLE)),
    actions=st.lists(
        st.builds(KvAction, SAYABLE | st.just("kv.retain"), SAYABLE | st.just("1.0"), SAYABLE), max_size=3
    ),
)
@thorough(300)
def test_nothing_that_json_can_say_raises(params: Any, xargs: Any, actions: list[KvAction]) -> None:
    hints = read_hints(params, xargs, actions)
    assert {field.name for field in fields(hints)} == set(asdict(hints))
    hints.to_keep(0.0)
