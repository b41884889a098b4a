"""What is said of a Mooncake Store, and what is no such thing."""

from pathlib import Path
from typing import Any

import pytest

from offload.errors import ConfigError
from offload.mooncake_config import MooncakeConfig
from offload.settings import Admit
from offload.tier_config import read_tiers

ADDRESS = {"master_server_address": "10.0.0.5:50051"}


def read(**settings: Any) -> MooncakeConfig:
    [tier] = read_tiers([{"kind": "mooncake", **settings}])
    assert isinstance(tier, MooncakeConfig)
    return tier


def test_defaults() -> None:
    tier = read(**ADDRESS)
    assert tier == MooncakeConfig(master_server_address="10.0.0.5:50051")
    assert (tier.master, tier.protocol, tier.metadata_server) == (("10.0.0.5", 50051), "tcp", "P2PHANDSHAKE")
    assert (tier.admit, tier.name_key, tier.local_hostname) == (Admit.ALL, None, None)
    assert str(tier) == "mooncake at 10.0.0.5:50051"


def test_all_of_it(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("0123456789abcdef\n")
    tier = read(
        master_server_address="[fd00::1]:50051",
        metadata_server="http://10.0.0.5:8080/metadata",
        protocol="rdma",
        device_name="mlx5_0,mlx5_1",
        local_hostname="10.0.0.9",
        tenant_id="one",
        admit="second-use",
        wait_seconds=1,
        name_key_file=str(secret),
    )
    assert (tier.master, tier.admit, tier.name_key) == (
        ("fd00::1", 50051),
        Admit.SECOND_USE,
        b"0123456789abcdef",
    )


@pytest.mark.parametrize(
    ("settings", "shown"),
    [
        ({}, r'lacks "master_server_address"; give it, as in "master_server_address": "10.0.0.5:50051"'),
        ({"master_server_address": "10.0.0.5"}, r"'10.0.0.5'; give \"host:port\""),
        ({"master_server_address": "http://10.0.0.5:50051"}, 'give "host:port"'),
        ({"master_server_address": 50051}, "is 50051; give"),
        ({"master_server_address": ":1"}, 'give "host:port"'),
        ({"master_server_address": "a:70000"}, "'a:70000'; give"),
        (ADDRESS | {"protocol": "ib"}, 'protocol of a mooncake tier is \'ib\'; use "tcp" or "rdma"'),
        (ADDRESS | {"metadata_server": ""}, "metadata_server of a mooncake tier is ''; give a string"),
        (ADDRESS | {"metadata_server": None}, "metadata_server of a mooncake tier is None; give a string"),
        (ADDRESS | {"device_name": 1}, "device_name of a mooncake tier is 1; give a string"),
        (ADDRESS | {"local_hostname": ""}, "local_hostname of a mooncake tier is ''"),
        (ADDRESS | {"tenant_id": ""}, "tenant_id of a mooncake tier is ''"),
        (ADDRESS | {"wait_seconds": 11}, "wait_seconds of a store is 11; give 0 to 10"),
        (ADDRESS | {"name_key_file": "here"}, "name_key_file of a store is 'here'; give a path"),
        (ADDRESS | {"admit": "policy"}, "admit of a store is 'policy'; use"),
        (ADDRESS | {"master_server_adress": "a:1"}, "did you mean 'master_server_address'"),
        (ADDRESS | {"global_segment_size": 1}, "unknown key 'global_segment_size' of a mooncake tier"),
    ],
)
def test_what_is_no_store_is_refused(settings: dict[str, Any], shown: str) -> None:
    with pytest.raises(ConfigError, match=shown):
        read(**settings)


def test_a_secret_that_is_too_short_is_refused(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("short")
    with pytest.raises(ConfigError, match="openssl rand"):
        _ = read(**ADDRESS, name_key_file=str(secret)).name_key
