"""Settings of fleets: every bad one is refused with the key, the value and the remedy."""

import math
from pathlib import Path
from typing import Any

import pytest

from offload import ConfigError, OffloadConfig
from offload.fleet_config import (
    MAX_PEERS,
    Address,
    FleetConfig,
    Role,
    TlsFiles,
    check_fleet_files,
    peer_name,
    read_address,
    read_fleet_key,
    read_peer_file,
)
from offload.transfer_params import NAME_BYTES

TLS = {"cert_file": "/a/cert.pem", "key_file": "/a/key.pem", "ca_file": "/a/ca.pem"}
KEY = {"fleet_key_file": "/a/key"}


def read(**settings: Any) -> FleetConfig:
    return OffloadConfig.from_mapping({"cpu_gib": 1, **settings}).fleet


def test_defaults() -> None:
    fleet = read()
    assert fleet == FleetConfig()
    assert (fleet.role, fleet.listen, fleet.peers, fleet.fleet_tls) == (Role.BOTH, None, (), None)
    assert (fleet.lease_seconds, fleet.share) == (60, 0.25)
    assert not fleet.is_used and not fleet.is_in_clear


def test_all_settings_are_read() -> None:
    settings = {
        "role": "prefill",
        "listen": "10.0.0.1:7100",
        "peers": ["kv.example:7100", "@/etc/peers", "[fd00::1]:7100"],
        "fleet_key_file": "/etc/key",
        "lease_seconds": 5,
        "lease_share": 0.7,
    }
    fleet = read(**settings, fleet_tls=TLS)
    assert {key: getattr(fleet, key) for key in settings} == settings | {"peers": tuple(settings["peers"])}  # type: ignore[arg-type]
    assert fleet.fleet_tls == TlsFiles(**TLS)
    assert fleet.listens_at == Address("10.0.0.1", 7100)
    assert fleet.share == 0.7


def test_a_prefill_engine_leases_more() -> None:
    assert read(role="prefill", listen="localhost:7100").share == 0.5
    assert read(role="decode", listen="localhost:7100").share == 0.25
    assert read(role="prefill", listen="localhost:7100", lease_share=0).share == 0


@pytest.mark.parametrize(
    ("settings", "key", "value", "remedy"),
    [
        ({"role": "producer"}, "role", "'producer'", "use one of: prefill, decode, both"),
        ({"role": None}, "role", "None", "use one of: prefill, decode, both"),
        ({"role": ["both"]}, "role", "['both']", "use one of: prefill, decode, both"),
        ({"role": "prefill"}, "role", "prefill", 'give listen, as in "listen": "127.0.0.1:7100"'),
        ({"rol": "both"}, "rol", "", "did you mean 'role'"),
        ({"fleet": {}}, "fleet", "", "unknown key 'fleet'"),
        ({"listen": 7100}, "listen", "7100", '"10.0.0.1:7100"'),
        ({"listen": ""}, "listen", "''", "no port"),
        ({"listen": "localhost"}, "listen", "'localhost'", "no port"),
        ({"listen": "localhost:0"}, "listen", "'localhost:0'", "from 1 to 65535"),
        ({"listen": "localhost:65536"}, "listen", "'localhost:65536'", "from 1 to 65535"),
        ({"listen": "localhost:"}, "listen", "'localhost:'", "from 1 to 65535"),
        ({"listen": "localhost:-1"}, "listen", "'localhost:-1'", "from 1 to 65535"),
        ({"listen": "localhost:٣"}, "listen", "'localhost:٣'", "from 1 to 65535"),
        ({"listen": ":7100"}, "listen", "':7100'", "no name"),
        ({"listen": "::1:7100"}, "listen", "'::1:7100'", "IPv6 address in brackets"),
        ({"listen": "[::g]:7100"}, "listen", "'[::g]:7100'", "between its brackets"),
        ({"listen": "http://a:7100"}, "listen", "'http://a:7100'", "no name"),
        ({"listen": "a b:7100"}, "listen", "'a b:7100'", "no name"),
        ({"listen": "a" * 300 + ":7100"}, "listen", "aaa", "no name"),
        ({"listen": "0.0.0.0:7100"}, "listen", "'0.0.0.0:7100'", "Set fleet_key_file"),
        ({"listen": "[::]:7100"}, "listen", "'[::]:7100'", "Set fleet_key_file"),
        ({"listen": "node-1:7100"}, "listen", "'node-1:7100'", "Set fleet_key_file"),
        ({"peers": ["node-1:7100"]}, "peers", "'node-1:7100'", "Set fleet_key_file"),
        ({"peers": "node-1:7100"}, "peers", "'node-1:7100'", "give a list"),
        ({"peers": {"a": 1}}, "peers", "{'a': 1}", "give a list"),
        ({"peers": None}, "peers", "None", "give a list"),
        ({"peers": [3]}, "one of peers", "3", '"10.0.0.1:7100"'),
        ({"peers": ["localhost"]}, "one of peers", "'localhost'", "no port"),
        ({"peers": ["@peers"]}, "a file of peers", "'peers'", 'from "/" on'),
        ({"peers": ["@"]}, "a file of peers", "''", 'from "/" on'),
        ({"peers": ["@/a\0b"]}, "a file of peers", "x00", 'from "/" on'),
        ({"peers": ["[::1]:1", "[::1]:1"]}, "peers", "'[::1]:1'", "leave it out once"),
        ({"peers": [f"localhost:{n}" for n in range(1, MAX_PEERS + 2)]}, "peers", "1025", "give 1024"),
        ({"fleet_key_file": "key"}, "fleet_key_file", "'key'", 'from "/" on'),
        ({"fleet_key_file": b"/key"}, "fleet_key_file", "b'/key'", 'from "/" on'),
        ({"fleet_tls": True}, "fleet_tls", "True", "just these keys"),
        ({"fleet_tls": {"cert_file": "/a"}}, "fleet_tls", "'/a'", "just these keys"),
        ({"fleet_tls": TLS | {"more": "/a"}}, "fleet_tls", "'more'", "just these keys"),
        ({"fleet_tls": TLS | {"ca_file": "ca.pem"}}, "ca_file of fleet_tls", "'ca.pem'", 'from "/" on'),
        ({"lease_seconds": 0}, "lease_seconds", "0", "such as 60"),
        ({"lease_seconds": True}, "lease_seconds", "True", "such as 60"),
        ({"lease_seconds": "60"}, "lease_seconds", "'60'", "such as 60"),
        ({"lease_seconds": math.nan}, "lease_seconds", "nan", "such as 60"),
        ({"lease_seconds": math.inf}, "lease_seconds", "inf", "such as 60"),
        ({"peer_transport": "rdma"}, "peer_transport", "'rdma'", "use one of: tcp, nixl"),
        ({"peer_transport": None}, "peer_transport", "None", "use one of: tcp, nixl"),
        ({"peer_transport": "nixl", "fleet_tls": TLS}, "peer_transport", "nixl", "Leave one of the two out"),
        ({"peer_wait_seconds": -1}, "peer_wait_seconds", "-1", "such as 10"),
        ({"peer_wait_seconds": True}, "peer_wait_seconds", "True", "such as 10"),
        ({"peer_wait_seconds": math.nan}, "peer_wait_seconds", "nan", "from 0 to 3600"),
        ({"lease_share": 1.1}, "lease_share", "1.1", "from 0 to 1"),
        ({"lease_share": -0.1}, "lease_share", "-0.1", "from 0 to 1"),
        ({"lease_share": math.nan}, "lease_share", "nan", "from 0 to 1"),
        ({"lease_share": True}, "lease_share", "True", "from 0 to 1"),
        ({"lease_share": "1"}, "lease_share", "'1'", "from 0 to 1"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_bad_settings_are_refused(settings: dict[str, Any], key: str, value: str, remedy: str) -> None:
    with pytest.raises(ConfigError) as refused:
        read(**settings)
    message = str(refused.value)
    assert key in message and value in message and remedy in message, message


@pytest.mark.parametrize(
    ("settings", "is_in_clear"),
    [
        ({"listen": "127.0.0.1:7100"}, False),
        ({"listen": "127.9.9.9:7100", "peers": ["[::1]:7", "LOCALHOST:7"]}, False),
        ({"listen": "0.0.0.0:7100", **KEY}, True),
        ({"listen": "0.0.0.0:7100", **KEY, "fleet_tls": TLS}, False),
        ({"peers": ["10.0.0.1:7100"], **KEY}, True),
        ({"peers": ["@/etc/peers"]}, True),
    ],
    ids=str,
)
def test_what_crosses_a_network_in_clear_is_known(settings: dict[str, Any], is_in_clear: bool) -> None:
    assert read(**settings).is_in_clear is is_in_clear


@pytest.mark.parametrize("text", ["10.0.0.1:7100", "[fd00::1]:65535", "a-b.example_c:1"])
def test_addresses_are_shown_as_they_are_written(text: str) -> None:
    assert read_address(text).shown == text


def test_a_file_of_peers() -> None:
    text = "# fleet\n10.0.0.1:7100  # the first\n\n[::1]:7100\r\n10.0.0.1:7100\n"
    assert read_peer_file(text) == (Address("10.0.0.1", 7100), Address("::1", 7100))
    with pytest.raises(ValueError, match="no port"):
        read_peer_file("10.0.0.1\n")
    with pytest.raises(ValueError, match="there may be 1024"):
        read_peer_file("".join(f"h:{n}\n" for n in range(1, MAX_PEERS + 2)))


def test_files_of_a_fleet_are_read_at_start(tmp_path: Path) -> None:
    key, pem = tmp_path / "key", tmp_path / "a.pem"
    config = FleetConfig(fleet_key_file=str(key), fleet_tls=TlsFiles(**dict.fromkeys(TLS, str(pem))))
    with pytest.raises(ConfigError, match=r"No such file.*may read"):
        check_fleet_files(config)
    key.write_bytes(b"short\n")
    with pytest.raises(ConfigError, match=r"5 bytes.*openssl rand"):
        check_fleet_files(config)
    key.write_bytes(b"x" * 5000)
    with pytest.raises(ConfigError, match=r"4097 bytes.*openssl rand"):
        check_fleet_files(config)
    key.write_bytes(b" 0123456789abcdef\n")
    assert read_fleet_key(str(key)) == b"0123456789abcdef"
    with pytest.raises(ConfigError, match=r"cert_file of fleet_tls .* name one, in PEM"):
        check_fleet_files(config)
    pem.write_text("")
    check_fleet_files(config)


def test_a_peer_has_the_same_name_after_a_restart() -> None:
    name = peer_name(Address("0.0.0.0", 7100))
    assert len(name) == NAME_BYTES
    assert peer_name(Address("0.0.0.0", 7100)) == name != peer_name(Address("0.0.0.0", 7101))
