"""Every bad tier is refused with a message that names the key, the value and the remedy."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from offload import ConfigError, OffloadConfig
from offload.settings import GIB, Admit
from offload.tier_config import DiskConfig, read_tiers

DISK = {"kind": "disk", "path": "/cache", "gib": 500}
STORE = {"kind": "valkey", "url": "redis://host:6379/0"}
MOONCAKE = {"kind": "mooncake", "master_server_address": "host:50051"}


def test_what_is_not_said() -> None:
    [tier] = read_tiers([DISK])
    assert tier == DiskConfig(path="/cache", gib=500)
    assert tier.admit is Admit.POLICY
    assert tier.root == Path("/cache/kv-offload")
    assert tier.num_bytes == tier.bytes_per_day == 500 * GIB


@pytest.mark.parametrize(("value", "num_bytes"), [(3, 3 * GIB), (0.5, GIB // 2), (2000, 2000 * GIB)])
def test_a_budget_of_its_own(value: float, num_bytes: int) -> None:
    [tier] = read_tiers([{**DISK, "write_gib_per_day": value}])
    assert (tier.bytes_per_day, tier.num_bytes) == (num_bytes, 500 * GIB)


@pytest.mark.parametrize("name", ["all", "policy", "second-use"])
def test_what_is_admitted(name: str) -> None:
    [tier] = read_tiers([{**DISK, "admit": name}])
    assert tier.admit is Admit(name)


def test_no_tiers_at_all() -> None:
    assert read_tiers([]) == read_tiers(()) == ()
    assert OffloadConfig.from_mapping({"cpu_gib": 8}).tiers == ()


def test_tiers_are_asked_in_order() -> None:
    tiers = read_tiers([DISK, {**DISK, "path": "/second"}])
    assert [tier.path for tier in tiers] == ["/cache", "/second"]
    assert read_tiers(tiers) is tiers


def test_beside_the_other_settings() -> None:
    config = OffloadConfig.from_mapping({"cpu_gib": 8, "tiers": [DISK]})
    assert config.tiers == (DiskConfig(path="/cache", gib=500),)


def without(key: str) -> Mapping[str, Any]:
    return {name: value for name, value in DISK.items() if name != key}


@pytest.mark.parametrize(
    ("value", "parts"),
    [
        (None, ["tiers is None", 'give a list, such as [{"kind": "disk"']),
        (7, ["tiers is 7", "give a list"]),
        ("/cache", ["tiers is '/cache'", "give a list"]),
        (b"/cache", ["tiers is b'/cache'", "give a list"]),
        (DISK, ["tiers is {'kind': 'disk'", "give a list"]),
        (["/cache"], ["a tier is '/cache'", 'give an object, such as {"kind": "disk"']),
        ([[]], ["a tier is []", "give an object"]),
        ([DISK, None], ["a tier is None", "give an object"]),
        ([{}], ["kind of a tier is None", "use one of: disk"]),
        ([without("kind")], ["kind of a tier is None", "use one of: disk"]),
        ([{**DISK, "kind": "Disk"}], ["kind of a tier is 'Disk'", "use one of: disk"]),
        ([{**DISK, "kind": []}], ["kind of a tier is []", "use one of: disk"]),
        ([without("path")], ['lacks "path"', 'as in "path": "/var/cache/kv"']),
        ([without("gib")], ['lacks "gib"', '"gib": 500']),
        ([{**DISK, "gb": 3}], ["unknown key 'gb'", "did you mean 'gib'"]),
        ([{**DISK, "zzz": 3}], ["unknown key 'zzz'", "known keys: kind, path, gib, admit"]),
        ([{**DISK, 3: 3}], ["unknown key 3", "known keys"]),
        ([{**DISK, "path": "cache"}], ["path of a disk tier is 'cache'", 'as in "/var/cache/kv"']),
        ([{**DISK, "path": "~/cache"}], ["'~/cache'", 'as in "/var/cache/kv"']),
        ([{**DISK, "path": ""}], ["is ''", "name a directory"]),
        ([{**DISK, "path": None}], ["is None", "name a directory"]),
        ([{**DISK, "path": 7}], ["is 7", "name a directory"]),
        ([{**DISK, "path": "/a\0b"}], [r"'/a\x00b'", "name a directory"]),
        ([{**DISK, "admit": "some"}], ["admit of a disk tier is 'some'", "all, policy, second-use"]),
        ([{**DISK, "admit": None}], ["is None", "all, policy, second-use"]),
        ([{**DISK, "admit": []}], ["is []", "all, policy, second-use"]),
        ([DISK, DISK], ["two tiers have the path '/cache'", "give each a directory of its own"]),
        ([DISK, {**DISK, "path": "/cache/"}], ["/cache", "give each a directory of its own"]),
        ([DISK, {**DISK, "path": "/x/../cache"}], ["/cache", "give each a directory of its own"]),
        ([STORE, DISK, STORE], ["two tiers are the same store, host:6379/0", "leave one of them out"]),
        ([STORE, {**STORE, "url": "redis://:word@host"}], ["same store, host:6379/0"]),
        ([MOONCAKE, MOONCAKE], ["two tiers are the same store, host:50051"]),
    ],
)
def test_a_refusal_names_value_and_remedy(value: Any, parts: list[str]) -> None:
    with pytest.raises(ConfigError) as refusal:
        OffloadConfig.from_mapping({"cpu_gib": 8, "tiers": value})
    for part in parts:
        assert part in str(refusal.value)


@pytest.mark.parametrize("key", ["gib", "write_gib_per_day"])
@pytest.mark.parametrize(
    "value", ["500", True, False, 0, 0.0, -1, -(10**400), 10**400, math.nan, math.inf, [500], {}]
)
def test_sizes_are_positive_numbers(key: str, value: Any) -> None:
    with pytest.raises(ConfigError) as refusal:
        read_tiers([{**DISK, key: value}])
    message = str(refusal.value)
    assert f"{key} of a disk tier is {value!r}" in message
    assert "give a positive number of GiB, such as 500" in message


def test_gib_must_be_said() -> None:
    with pytest.raises(ConfigError, match="gib of a disk tier is None"):
        read_tiers([{**DISK, "gib": None}])


def test_a_budget_that_is_null_is_the_size() -> None:
    [tier] = read_tiers([{**DISK, "write_gib_per_day": None}])
    assert tier.bytes_per_day == 500 * GIB
