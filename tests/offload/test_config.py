"""Every bad setting is refused with a message that names the key, the value and the remedy."""

import math
from collections.abc import Mapping
from dataclasses import FrozenInstanceError
from pathlib import Path
from typing import Any

import pytest

from offload import ConfigError, OffloadConfig
from offload import config as config_module
from offload.config import StoreWhen, check_record_trace, unwritable
from offload.restore_config import RestoreWhen
from offload.settings import GIB
from offload.worker.pool.host_limits import check_host_memory, host_memory_bytes

PEER = "127.0.0.1:7100"
POOL = {"kind": "shared-memory", "path": "/dev/shm/kv"}
POLICIES = "arc, fifo, hazard, lfu, lru, s3fifo"


@pytest.mark.parametrize(
    ("settings", "key", "value", "remedy"),
    [
        ({"cpu_gb": 8}, "cpu_gb", "", "did you mean 'cpu_gib'"),
        ({"cpu_gib": 8, "cpugib": 8}, "cpugib", "", "did you mean 'cpu_gib'"),
        ({"cpu_gib": 8, "store_decode": False}, "store_decode", "", "did you mean 'store_decode_blocks'"),
        (
            {"cpu_gib": 8, "zzz": 1},
            "zzz",
            "",
            "known keys: cpu_gib, store_decode_blocks, eviction_policy, verify_loads, hinted_share, "
            "record_trace, huge_pages",
        ),
        ({"cpu_gib": 8, "": 1}, "''", "", "known keys: cpu_gib"),
        ({}, "cpu_gib", "lacks", 'add, say, "cpu_gib": 8'),
        ({"eviction_policy": "lru"}, "cpu_gib", "lacks", 'add, say, "cpu_gib": 8'),
        ({"cpu_gib": "8"}, "cpu_gib", "'8'", "as a number, such as 8"),
        ({"cpu_gib": True}, "cpu_gib", "True", "as a number, such as 8"),
        ({"cpu_gib": None}, "cpu_gib", "None", "as a number, such as 8"),
        ({"cpu_gib": [8]}, "cpu_gib", "[8]", "as a number, such as 8"),
        ({"cpu_gib": 0}, "cpu_gib", "0", "a positive number, such as 8"),
        ({"cpu_gib": 0.0}, "cpu_gib", "0.0", "a positive number, such as 8"),
        ({"cpu_gib": -1}, "cpu_gib", "-1", "a positive number, such as 8"),
        ({"cpu_gib": -0.5}, "cpu_gib", "-0.5", "a positive number, such as 8"),
        ({"cpu_gib": math.nan}, "cpu_gib", "nan", "a positive number, such as 8"),
        ({"cpu_gib": math.inf}, "cpu_gib", "inf", "a positive number, such as 8"),
        ({"cpu_gib": -math.inf}, "cpu_gib", "-inf", "a positive number, such as 8"),
        ({"cpu_gib": -(10**400)}, "cpu_gib", "-1000", "a positive number, such as 8"),
        ({"cpu_gib": 8, "cpu_gib_max": 4}, "cpu_gib_max", "4", "give cpu_gib, 8, or more"),
        ({"cpu_gib": 8, "cpu_gib_max": 1e6}, "cpu_gib_max", "1000000.0", "give at most 65,536"),
        ({"cpu_gib": 8, "cpu_gib_max": 10**400}, "cpu_gib_max", "1000", "give at most 65,536"),
        ({"cpu_gib": 8, "cpu_gib_max": math.nan}, "cpu_gib_max", "nan", "give cpu_gib, 8, or more"),
        ({"cpu_gib": 8, "cpu_gib_max": "16"}, "cpu_gib_max", "'16'", "in GiB, such as 16"),
        (
            {"cpu_gib": 8, "store_decode_blocks": "no"},
            "store_decode_blocks",
            "'no'",
            'use true, false or "auto"',
        ),
        ({"cpu_gib": 8, "store_decode_blocks": 0}, "store_decode_blocks", "0", 'use true, false or "auto"'),
        (
            {"cpu_gib": 8, "store_decode_blocks": None},
            "store_decode_blocks",
            "None",
            'use true, false or "auto"',
        ),
        ({"cpu_gib": 8, "store_decode_blocks": "Auto"}, "store_decode_blocks", "'Auto'", 'false or "auto"'),
        ({"cpu_gib": 8, "huge_pages": "yes"}, "huge_pages", "'yes'", 'use true, false or "auto"'),
        ({"cpu_gib": 8, "huge_pages": 1}, "huge_pages", "1", 'use true, false or "auto"'),
        ({"cpu_gib": 8, "huge_page": True}, "huge_page", "", "did you mean 'huge_pages'"),
        (
            {"cpu_gib": 8, "verify_loads": "often"},
            "verify_loads",
            "'often'",
            "use one of: always, sampled, never",
        ),
        ({"cpu_gib": 8, "verify_loads": True}, "verify_loads", "True", "use one of: always, sampled, never"),
        ({"cpu_gib": 8, "verify_loads": ["always"]}, "verify_loads", "['always']", "use one of: always"),
        ({"cpu_gib": 8, "eviction_policy": "LRU"}, "eviction_policy", "'LRU'", f"use one of: {POLICIES}"),
        ({"cpu_gib": 8, "eviction_policy": 3}, "eviction_policy", "3", f"use one of: {POLICIES}"),
        ({"cpu_gib": 8, "eviction_policy": ["lru"]}, "eviction_policy", "['lru']", f"use one of: {POLICIES}"),
        ({"cpu_gib": 8, "eviction_policy": None}, "eviction_policy", "None", f"use one of: {POLICIES}"),
        ({"cpu_gib": 8, "hinted_share": 1.01}, "hinted_share", "1.01", "a part of the pool from 0 to 1"),
        ({"cpu_gib": 8, "hinted_share": -1}, "hinted_share", "-1", "a part of the pool from 0 to 1"),
        ({"cpu_gib": 8, "hinted_share": math.nan}, "hinted_share", "nan", "a part of the pool from 0 to 1"),
        ({"cpu_gib": 8, "hinted_share": True}, "hinted_share", "True", "a part of the pool from 0 to 1"),
        ({"cpu_gib": 8, "hinted_share": "0.5"}, "hinted_share", "'0.5'", "a part of the pool from 0 to 1"),
        ({"cpu_gib": 8, "fetch_gpu_share": 2}, "fetch_gpu_share", "2", "a part of the GPU's blocks from 0"),
        ({"cpu_gib": 8, "fetch_gpu_share": "1"}, "fetch_gpu_share", "'1'", "a part of the GPU's blocks from"),
        ({"cpu_gib": 8, "restore": "Auto"}, "restore", "'Auto'", "use one of: auto, always, never"),
        ({"cpu_gib": 8, "restore": False}, "restore", "False", "use one of: auto, always, never"),
        ({"cpu_gib": 8, "restore": {}}, "restore", "{}", "use one of: auto, always, never"),
        ({"cpu_gib": 8, "restore": "never", "role": "decode"}, "restore", "'never'", "leave out one of them"),
        ({"cpu_gib": 8, "store": "Lazy"}, "store", "'Lazy'", "use one of: eager, lazy, auto"),
        ({"cpu_gib": 8, "store": True}, "store", "True", "use one of: eager, lazy, auto"),
        ({"cpu_gib": 8, "store": []}, "store", "[]", "use one of: eager, lazy, auto"),
        ({"cpu_gib": 8, "store": "lazy", "pool": POOL}, "pool is read", "'lazy'", 'or use "eager"'),
        ({"cpu_gib": 8, "store": "lazy", "listen": PEER}, "listen shows", "'lazy'", 'or use "eager"'),
        ({"cpu_gib": 8, "store": "lazy", "role": "prefill", "listen": PEER}, "listen", "'lazy'", "leave out"),
        ({"cpu_gib": 8, "operator_socket": "run"}, "operator_socket", "'run'", 'from "/" on'),
        ({"cpu_gib": 8, "operator_socket": 7}, "operator_socket", "7", 'from "/" on'),
        ({"cpu_gib": 8, "operator_socket": "/r\0"}, "operator_socket", r"'/r\x00'", 'from "/" on'),
        ({"cpu_gib": 8, "operator_socket": "/é" + 87 * "r"}, "operator_socket", "90 bytes", "at most 89"),
        ({"cpu_gib": 8, "record_trace": True}, "record_trace", "True", "name a file to write"),
        ({"cpu_gib": 8, "record_trace": 3}, "record_trace", "3", "name a file to write"),
        ({"cpu_gib": 8, "record_trace": ""}, "record_trace", "''", "name a file to write"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_bad_settings_are_refused(settings: Mapping[str, Any], key: str, value: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as refused:
        OffloadConfig.from_mapping(settings)
    message = str(refused.value)
    assert key in message
    assert value in message
    assert remedy in message


@pytest.mark.parametrize("size", [8, 0.5, 1e-9, 10**30])
def test_any_positive_size_is_a_size(size: float) -> None:
    assert OffloadConfig.from_mapping({"cpu_gib": size}).cpu_bytes == int(size * GIB)


def test_defaults() -> None:
    config = OffloadConfig.from_mapping({"cpu_gib": 8})
    assert config == OffloadConfig(cpu_gib=8, store_decode_blocks=True, eviction_policy="hazard")
    assert config.cpu_bytes == 8 * 2**30
    assert config.hinted_share == 0.25
    assert config.fetch_gpu_share == 0.1
    assert config.huge_pages == "auto"
    assert config.restore is RestoreWhen.AUTO
    assert config.store is StoreWhen.AUTO


@pytest.mark.parametrize("share", [0, 0.0, 0.3, 1])
def test_any_part_of_the_pool_may_be_protected(share: float) -> None:
    assert OffloadConfig(cpu_gib=8, hinted_share=share).hinted_share == share


def test_all_settings_are_read() -> None:
    settings = {
        "cpu_gib": 1.5,
        "store_decode_blocks": False,
        "eviction_policy": "lru",
        "hinted_share": 0.5,
        "fetch_gpu_share": 0,
        "record_trace": "trace.jsonl",
        "huge_pages": True,
        "restore": "auto",
        "store": "lazy",
    }
    config = OffloadConfig.from_mapping(settings)
    assert {key: getattr(config, key) for key in settings} == settings


@pytest.mark.parametrize(
    ("settings", "num_slots", "is_lazy"),
    [
        ({}, 400, True),
        ({}, 401, False),
        ({"store": "eager"}, 1, False),
        ({"store": "lazy"}, 10**9, True),
        ({"store": "lazy", "peers": [PEER], "role": "decode"}, 10**9, True),
        ({"store": "auto"}, 400, True),
        ({"store": "auto"}, 401, False),
        ({"store": "auto", "listen": PEER}, 1, False),
        ({"store": "auto", "pool": POOL}, 1, False),
    ],
    ids=str,
)
def test_when_it_stores(settings: dict[str, Any], num_slots: int, is_lazy: bool) -> None:
    """Of a GPU of 100 blocks."""
    config = OffloadConfig.from_mapping({"cpu_gib": 8, **settings})
    assert config.stores_lazily(num_slots, 100) is is_lazy
    assert config.stores_lazily(num_slots, 100, is_read=True) is (config.store is StoreWhen.LAZY)


@pytest.mark.parametrize(
    ("restore", "role", "when"),
    [
        ("auto", "both", RestoreWhen.AUTO),
        ("auto", "prefill", RestoreWhen.AUTO),
        ("auto", "decode", RestoreWhen.ALWAYS),
        ("always", "decode", RestoreWhen.ALWAYS),
        ("always", "both", RestoreWhen.ALWAYS),
        ("never", "both", RestoreWhen.NEVER),
        ("never", "prefill", RestoreWhen.NEVER),
    ],
)
def test_what_others_prefilled_for_it_is_restored_always(restore: str, role: str, when: RestoreWhen) -> None:
    settings = {"cpu_gib": 8, "restore": restore, "role": role, "listen": "127.0.0.1:7100"}
    assert OffloadConfig.from_mapping(settings).restore_when is when


@pytest.mark.parametrize(("given", "stored"), [(True, True), (False, False), ("auto", None)])
def test_answers_are_stored_or_not_or_it_is_learned(given: bool | str, stored: bool | None) -> None:
    assert OffloadConfig(cpu_gib=8, store_decode_blocks=given).store_answers is stored


@pytest.mark.parametrize(
    ("settings", "is_alone"),
    [
        ({"role": "decode"}, True),
        ({"role": "decode", "listen": "127.0.0.1:7100"}, True),
        ({"role": "decode", "tiers": [{"kind": "disk", "path": "/var/cache/kv", "gib": 1}]}, True),
        ({"role": "decode", "peers": ["127.0.0.1:7100"]}, False),
        ({"role": "decode", "tiers": [{"kind": "redis", "url": "redis://localhost"}]}, False),
        ({"role": "decode", "pool": {"kind": "shared-memory", "path": "/dev/shm/kv"}}, False),
        ({"role": "both"}, False),
        ({}, False),
    ],
    ids=str,
)
def test_who_decodes_needs_somebody_to_fetch_from(settings: dict[str, Any], is_alone: bool) -> None:
    assert OffloadConfig.from_mapping({"cpu_gib": 8, **settings}).fetches_from_nobody is is_alone


def test_settings_cannot_be_changed() -> None:
    config = OffloadConfig(cpu_gib=8)
    with pytest.raises(FrozenInstanceError):
        config.cpu_gib = 9  # type: ignore[misc]


@pytest.mark.parametrize("size", [8.01, 9, 1e12, 1e300, 10**400], ids=lambda size: str(size)[:8])
def test_a_pool_larger_than_memory_is_refused(size: float) -> None:
    with pytest.raises(ConfigError) as refused:
        check_host_memory(OffloadConfig(cpu_gib=size), 8 * GIB)
    assert f"cpu_gib is {size}" in str(refused.value)
    assert "has 8.0 GiB" in str(refused.value)
    assert "lower cpu_gib to at most" in str(refused.value)


@pytest.mark.parametrize("size", [8, 8.0, 7.99, 1e-9])
def test_a_pool_that_fits_in_memory_passes(size: float) -> None:
    check_host_memory(OffloadConfig(cpu_gib=size), 8 * GIB)


def test_this_machines_memory_is_the_bound() -> None:
    has = host_memory_bytes() / GIB
    check_host_memory(OffloadConfig(cpu_gib=has))
    with pytest.raises(ConfigError, match="GiB of memory"):
        check_host_memory(OffloadConfig(cpu_gib=has * 1.001))


def test_a_trace_that_can_be_written_passes(tmp_path: Path) -> None:
    check_record_trace(OffloadConfig(cpu_gib=8))
    path = tmp_path / "trace.jsonl"
    check_record_trace(OffloadConfig(cpu_gib=8, record_trace=str(path)))
    path.touch()
    check_record_trace(OffloadConfig(cpu_gib=8, record_trace=str(path)))
    assert path.read_bytes() == b""


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("", "it is a directory"),
        ("no/trace.jsonl", "there is no directory"),
        ("x" * 999, "too long"),
        ("a\0b", "NUL character"),
    ],
    ids=["directory", "missing", "long", "nul"],
)
def test_a_trace_that_cannot_is_refused(name: str, reason: str, tmp_path: Path) -> None:
    path = str(tmp_path / name)
    with pytest.raises(ConfigError, match=r"record_trace is .*; name a file in a directory") as refused:
        check_record_trace(OffloadConfig(cpu_gib=8, record_trace=path))
    assert repr(path) in str(refused.value)
    assert reason in str(refused.value)


def test_a_trace_in_a_directory_of_others_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even if the file itself could be written: recordings are new files."""
    path = tmp_path / "trace.jsonl"
    path.touch()
    monkeypatch.setattr(config_module.os, "access", lambda target, mode: Path(target) == path)
    assert unwritable(path) is None
    with pytest.raises(ConfigError, match="may not be written to"):
        check_record_trace(OffloadConfig(cpu_gib=8, record_trace=str(path)))
