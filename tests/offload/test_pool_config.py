"""Every bad pool is refused with a message that names the key, the value and the remedy."""

import math
from pathlib import Path
from typing import Any

import pytest

from offload import ConfigError, OffloadConfig
from offload.pool_config import SharedMemoryConfig, read_pool
from offload.settings import GIB

POOL = {"kind": "shared-memory", "path": "/dev/shm/kv"}


def test_none_by_default() -> None:
    assert OffloadConfig.from_mapping({"cpu_gib": 8}).pool is None
    assert OffloadConfig.from_mapping({"cpu_gib": 8, "pool": None}).pool is None


def test_beside_the_other_settings() -> None:
    config = OffloadConfig.from_mapping({"cpu_gib": 8, "pool": {**POOL, "gib": 20}})
    assert config.pool == SharedMemoryConfig(path="/dev/shm/kv", gib=20)
    assert config.pool.root == Path("/dev/shm/kv/kv-offload-pool")
    assert config.pool.num_bytes == 20 * GIB
    assert read_pool(config.pool) is config.pool
    assert SharedMemoryConfig(path="/x").num_bytes is None


@pytest.mark.parametrize(
    ("value", "parts"),
    [
        (7, ["pool is 7", 'give an object, such as {"kind": "shared-memory"']),
        ("shared-memory", ["pool is 'shared-memory'"]),
        ({"path": "/x"}, ["kind of the pool is None", "shared-memory", "leave pool out"]),
        ({**POOL, "kind": "disk"}, ["kind of the pool is 'disk'"]),
        ({"kind": "shared-memory"}, ['lacks "path"', "/dev/shm"]),
        ({**POOL, "pth": 1}, ["unknown key 'pth'", "did you mean 'path'?"]),
        ({**POOL, "zzzz": 1}, ["unknown key 'zzzz'", "known keys: kind, path, gib"]),
        ({**POOL, "path": "kv"}, ["path of the pool is 'kv'", "name a directory"]),
        ({**POOL, "path": "/a\0b"}, ["path of the pool is"]),
        ({**POOL, "path": 7}, ["path of the pool is 7"]),
        *(
            ({**POOL, "gib": gib}, ["gib of the pool is"])
            for gib in (0, -1, 10**400, math.inf, math.nan, True, "8")
        ),
        ({**POOL, "wait_seconds": 11}, ["wait_seconds of the pool is 11", "give 0 to 10"]),
    ],
)
def test_refused(value: Any, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as refusal:
        OffloadConfig.from_mapping({"cpu_gib": 8, "pool": value})
    assert all(part in str(refusal.value) for part in parts), refusal.value
