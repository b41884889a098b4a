"""Every bad store is refused with a message that names the key, the value and the remedy."""

from pathlib import Path
from typing import Any

import pytest

from offload import ConfigError, OffloadConfig
from offload.settings import Admit
from offload.store_config import StoreAddress, StoreConfig
from offload.tier_config import DiskConfig, read_tiers

STORE = {"kind": "valkey", "url": "redis://host:6379/0"}
DISK = {"kind": "disk", "path": "/cache", "gib": 500}


def test_what_is_not_said() -> None:
    [tier] = read_tiers([STORE])
    assert tier == StoreConfig(kind="valkey", url="redis://host:6379/0")
    assert isinstance(tier, StoreConfig)
    assert (tier.admit, tier.ttl_seconds, tier.wait_seconds) == (Admit.ALL, 86_400, 0.02)
    assert tier.address == StoreAddress("host")
    assert tier.name_key is None
    assert str(tier) == "valkey at host:6379/0"


def test_tiers_of_both_kinds_in_order() -> None:
    config = OffloadConfig.from_mapping({"cpu_gib": 8, "tiers": [DISK, {**STORE, "kind": "redis"}]})
    assert [type(tier) for tier in config.tiers] == [DiskConfig, StoreConfig]
    assert read_tiers(config.tiers) is config.tiers


@pytest.mark.parametrize("admit", [Admit.ALL, Admit.SECOND_USE])
def test_what_is_admitted(admit: Admit) -> None:
    [tier] = read_tiers([{**STORE, "admit": str(admit)}])
    assert isinstance(tier, StoreConfig) and tier.admit is admit


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"url": 7}, ["url of a store is 7", "redis://host:6379/0"]),
        ({"url": "host"}, ["url of a store", "redis://host:6379/0"]),
        ({"urls": "x"}, ["unknown key 'urls' of a valkey tier", "did you mean 'url'?"]),
        ({"kind": "memcached"}, ["kind of a tier is 'memcached'", "disk, valkey, redis"]),
        ({"admit": "policy"}, ["admit of a store is 'policy'", '"second-use"']),
        ({"ttl_seconds": 0}, ["ttl_seconds of a store is 0", "86400"]),
        ({"ttl_seconds": "1d"}, ["ttl_seconds of a store is '1d'"]),
        ({"ttl_seconds": 1e18}, ["ttl_seconds of a store is 1e+18", "give 1 to 1,000,000,000"]),
        ({"url": "redis://host:6379/x"}, ["url of a store is 'redis://host:6379/x'"]),
        ({"url": "host:6379"}, ["url of a store is 'host:6379'"]),
        ({"url": "redis://:word@host:99999/0"}, ["'redis://...@host:99999/0'", "host or port"]),
        ({"url": "redis://:word/x@host"}, ["'redis://...@host'", "%2F"]),
        ({"url": "u:word@host:6379"}, ["url of a store is 'u://...@host:6379'"]),
        ({"url": "redis:/:word@host"}, ["url of a store is 'redis://...@host'"]),
        ({"url": "redis://:a#word@host"}, ["url of a store is 'redis://...@host'"]),
        ({"wait_seconds": -1}, ["wait_seconds of a store is -1", "0.02"]),
        ({"wait_seconds": True}, ["wait_seconds of a store is True"]),
        ({"ca_file": "ca.pem", "url": "rediss://host"}, ["ca_file of a store is 'ca.pem'", 'from "/" on']),
        ({"ca_file": "/ca.pem"}, ["ca_file", '"rediss://"']),
        ({"name_key_file": 5}, ["name_key_file of a store is 5"]),
        ({"url": "redis://:word@host", "password_file": "/p"}, ["password_file", "one of them"]),
        ({"gib": 5}, ["unknown key 'gib' of a valkey tier"]),
    ],
)
def test_what_is_refused(changes: dict[str, Any], parts: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        read_tiers([STORE | changes])
    assert all(part in str(refused.value) for part in parts), refused.value
    assert "word" not in str(refused.value).replace("password", "").replace("user:password", "")


def test_a_store_without_a_url() -> None:
    with pytest.raises(ConfigError, match=r'a redis tier lacks "url"; give it, as in "url": "redis://'):
        read_tiers([{"kind": "redis"}])


def test_secrets_come_from_files(tmp_path: Path) -> None:
    (tmp_path / "password").write_text("s3cret\n")
    (tmp_path / "key").write_text("k" * 32 + "\n")
    files = {"password_file": str(tmp_path / "password"), "name_key_file": str(tmp_path / "key")}
    [tier] = read_tiers([STORE | files])
    assert isinstance(tier, StoreConfig)
    assert tier.address.password == "s3cret"
    assert tier.name_key == b"k" * 32
    assert "s3cret" not in f"{tier} {tier!r}"


@pytest.mark.parametrize("name", ["password_file", "name_key_file"])
def test_a_file_that_is_not_there(tmp_path: Path, name: str) -> None:
    [tier] = read_tiers([STORE | {name: str(tmp_path / "none")}])
    assert isinstance(tier, StoreConfig)
    with pytest.raises(ConfigError, match=f"{name} {tmp_path}/none cannot be read"):
        _ = tier.address, tier.name_key


def test_a_secret_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("short")
    [tier] = read_tiers([STORE | {"name_key_file": str(tmp_path / "key")}])
    assert isinstance(tier, StoreConfig)
    with pytest.raises(ConfigError, match="has 5 bytes; 16 or more"):
        _ = tier.name_key
