"""What requests say of hand-offs: built, read whatever it is, and handed on."""

import json
import logging
import subprocess
import sys
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload import KVTransferParams
from offload.scheduler import client_values
from offload.scheduler.hints import read_hints
from offload.transfer_params import HAND_OFF_KEYS, MAX_TOKENS, tip_of

PEER, EPOCH, TIP = "0123456789abcdef", "f" * 16, "ab" * 16
FULL = KVTransferParams(do_remote_prefill=True, peer=PEER, epoch=EPOCH, tokens=MAX_TOKENS, tip=TIP)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=40),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
LIKELY = st.sampled_from([1, PEER, EPOCH, TIP, 8192, True, "1", -1, 10**400, 1.0, "é" * 16, "F" * 16, {}, []])
OBJECTS = st.dictionaries(
    st.sampled_from([*HAND_OFF_KEYS, "do_remote_decode", "do_remote_prefill"]) | st.text(max_size=30),
    LIKELY | JSON,
    max_size=10,
)


@pytest.fixture(autouse=True)
def _nothing_warned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_values, "_warned", set())


@pytest.mark.parametrize("modules", ["offload", "offload.transfer_params", "offload.fleet_config"])
def test_neither_torch_nor_vllm_is_imported(modules: str) -> None:
    names = "{'torch', 'vllm'}"
    code = f"import sys, {modules}, offload; offload.KVTransferParams; print({names} & {{*sys.modules}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_a_reference_comes_back_as_it_was_sent() -> None:
    told = FULL.to_dict()
    assert told == {
        "do_remote_prefill": True,
        "cpu_offload_from_v": 1,
        "cpu_offload_from_peer": PEER,
        "cpu_offload_from_epoch": EPOCH,
        "cpu_offload_from_tokens": MAX_TOKENS,
        "cpu_offload_from_tip": TIP,
    }
    assert KVTransferParams.read(json.loads(json.dumps(told))) == FULL


def test_it_is_small_even_with_what_vllm_adds() -> None:
    assert len(json.dumps(FULL.to_dict() | {"remote_prefill_cached_tokens": 1_000_000})) <= 300
    assert len(json.dumps(KVTransferParams(refused="x" * 120).to_dict())) <= 300


@given(
    peer=st.none() | st.just(PEER),
    epoch=st.none() | st.just(EPOCH),
    tokens=st.none() | st.integers(1, MAX_TOKENS),
    tip=st.none() | st.binary(min_size=16, max_size=32).map(tip_of),
    decode=st.booleans(),
    prefill=st.booleans(),
    refused=st.none() | st.just("no room"),
)
def test_whatever_can_be_built_is_read(
    peer: Any, epoch: Any, tokens: Any, tip: Any, decode: bool, prefill: bool, refused: Any
) -> None:
    try:
        params = KVTransferParams(
            do_remote_decode=decode,
            do_remote_prefill=prefill,
            peer=peer,
            epoch=epoch,
            tokens=tokens,
            tip=tip,
            refused=refused,
        )
    except ValueError:
        assert peer is None or (tip is not None and tokens is None)
        return
    assert KVTransferParams.read(params.to_dict()) == params


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"peer": "10.0.0.1:7100"}, "peer"),
        ({"peer": PEER.upper()}, "peer"),
        ({"peer": PEER + "\n"}, "peer"),
        ({"epoch": EPOCH}, "lacks its peer"),
        ({"peer": PEER, "epoch": 3}, "epoch"),
        ({"peer": PEER, "tokens": True}, "tokens"),
        ({"peer": PEER, "tokens": 0}, "tokens"),
        ({"peer": PEER, "tokens": MAX_TOKENS + 1}, "tokens"),
        ({"peer": PEER, "tokens": 16.0}, "tokens"),
        ({"peer": PEER, "tokens": 16, "tip": "ab"}, "tip"),
        ({"peer": PEER, "tip": TIP}, "tip says where"),
        ({"refused": ""}, "refused"),
        ({"refused": "x" * 121}, "refused"),
        ({"refused": "é"}, "refused"),
        ({"do_remote_decode": 1}, "do_remote_decode"),
    ],
    ids=str,
)
def test_what_is_wrong_is_not_built(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        KVTransferParams(**wrong)


@given(JSON | OBJECTS)
def test_whatever_a_client_sends_is_read(params: Any) -> None:
    read = KVTransferParams.read(params)
    assert KVTransferParams.read(read.to_dict()) == read
    assert len(json.dumps(read.to_dict())) <= 300
    read_hints(params)


@given(JSON | OBJECTS, JSON | OBJECTS)
def test_a_client_names_no_other_engine(client: Any, engine: Any) -> None:
    kept = KVTransferParams.strip(client)
    assert KVTransferParams.read(kept) == KVTransferParams()
    assert all(key.startswith("cpu_offload_") or "tokens" in key or "token_ids" in key for key in kept)
    merged = KVTransferParams.merge(client, engine)
    assert merged == kept | (engine if isinstance(engine, dict) else {})


def test_hints_of_a_client_stay() -> None:
    hints = {"cpu_offload_priority": "high", "max_load_tokens": 5, "prompt_token_ids": [1, 2]}
    foreign = {"do_remote_prefill": True, "remote_host": "evil", "remote_block_ids": [1], "transfer_id": "x"}
    own = {"cpu_offload_from_v": 1, "cpu_offload_from_peer": PEER, "cpu_offload_refused": "x"}
    assert KVTransferParams.strip(hints | foreign | own) == hints
    assert KVTransferParams.merge(hints | foreign, FULL.to_dict()) == hints | FULL.to_dict()


def test_a_huge_object_is_looked_at_in_part() -> None:
    params = {f"cpu_offload_{n}": n for n in range(10_000)} | {"max_load_tokens": 3}
    kept = KVTransferParams.strip(params)
    assert kept["max_load_tokens"] == 3
    assert len(kept) == 257


@pytest.mark.parametrize(
    "params",
    [
        "text",
        ["cpu_offload_from_v"],
        {"cpu_offload_from_v": 2, "cpu_offload_from_peer": PEER},
        {"cpu_offload_from_v": True, "cpu_offload_from_peer": PEER},
        {"cpu_offload_from_v": 1},
        {"cpu_offload_from_v": 1, "cpu_offload_from_peer": "10.0.0.1:80"},
        {"cpu_offload_from_v": 1, "cpu_offload_from_peer": PEER, "cpu_offload_from_tokens": 10**5000},
        {"cpu_offload_from_v": 1, "cpu_offload_from_peer": PEER, "cpu_offload_from_tip": [[]]},
        {"cpu_offload_refused": {"a": 1}},
    ],
    ids=lambda value: str(list(value))[:60],
)
def test_what_is_wrong_is_ignored_with_one_warning(params: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert KVTransferParams.read(params) == KVTransferParams()
    assert len(caplog.records) == 1
    assert len(caplog.text) < 1000


def test_keys_of_hand_offs_are_no_unknown_hints(caplog: pytest.LogCaptureFixture) -> None:
    params = FULL.to_dict() | {"cpu_offload_refused": "no room"}
    with caplog.at_level(logging.WARNING):
        read_hints(params)
        assert KVTransferParams.read(params).peer == PEER
    assert not caplog.records
    read_hints(params | {"cpu_offload_form_v": 1})
    assert "cpu_offload_form_v" in caplog.text


def test_a_tip_is_the_beginning_of_a_hash() -> None:
    assert tip_of(bytes(range(32))) == bytes(range(16)).hex()
    assert tip_of(b"\1" * 16) == "01" * 16
    assert tip_of(b"\1" * 8) == "01" * 8 + "00" * 8


def test_a_report_of_another_leg_is_passed_to_nobody() -> None:
    told = {"cpu_offload_report": {"tokens": {}}, "remote_host": "h"}
    assert KVTransferParams.merge({"cpu_offload_report": True}, told) == {
        "cpu_offload_report": True,
        "remote_host": "h",
    }
    assert KVTransferParams.merge(None, told) == {"remote_host": "h"}
