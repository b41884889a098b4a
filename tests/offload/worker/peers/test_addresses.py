"""Where peers are: names that move, files that change, and what cannot be looked up."""

import logging
import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from offload.fleet_config import Address
from offload.worker.peers.addresses import LOOKUP_SECONDS, Addresses, resolve


class Names:
    """A resolver whose names are told, and a clock."""

    def __init__(self, **known: list[str]) -> None:
        self.known = known
        self.asked: list[str] = []
        self.now = 0.0

    def resolve(self, host: str) -> Sequence[str]:
        self.asked.append(host)
        if host not in self.known:
            raise OSError("Name or service not known")
        return self.known[host]

    def of(self, *peers: str, rank: int = 0) -> Addresses:
        return Addresses(peers, rank, resolve=self.resolve, clock=lambda: self.now)


def test_each_address_of_a_name_is_a_peer_and_each_rank_has_a_port() -> None:
    names = Names(prefill=["10.0.0.1", "10.0.0.2"], other=["10.0.0.2"])
    assert names.of("prefill:7100", "other:7100", "other:7200", rank=3).look() == [
        Address("10.0.0.1", 7103),
        Address("10.0.0.2", 7103),
        Address("10.0.0.2", 7203),
    ]


def test_names_are_looked_up_again_after_a_while() -> None:
    names = Names(prefill=["10.0.0.1"])
    addresses = names.of("prefill:7100")
    addresses.look()
    names.known["prefill"] = ["10.0.0.9"]
    names.now = LOOKUP_SECONDS - 0.1
    assert addresses.look() == [Address("10.0.0.1", 7100)]
    names.now = LOOKUP_SECONDS
    assert addresses.look() == [Address("10.0.0.9", 7100)]
    assert names.asked == ["prefill", "prefill"]
    addresses.check_invariants()


def test_what_cannot_be_looked_up_stays_as_it_was_and_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    names = Names(prefill=["10.0.0.1"])
    addresses = names.of("prefill:7100", "never:7100")
    with caplog.at_level(logging.WARNING):
        for turn in range(5):
            names.now = turn * LOOKUP_SECONDS
            assert addresses.look() == [Address("10.0.0.1", 7100)]
            names.known.clear()
    assert [record.message.partition(" of peers")[0] for record in caplog.records] == [
        "the name never",
        "the name prefill",
    ]


def test_a_file_is_read_again_when_it_changes(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file, names = tmp_path / "peers", Names(**{"10.0.0.1": ["10.0.0.1"], "10.0.0.2": ["10.0.0.2"]})
    addresses = names.of(f"@{file}")
    with caplog.at_level(logging.WARNING):
        assert addresses.look() == []
        assert "cannot be read" in caplog.text
        file.write_text("# none yet\n10.0.0.1:7100\n")
        assert addresses.look() == [Address("10.0.0.1", 7100)]
        for wrong in ("10.0.0.1", "x" * 100, "10.0.0.1:99999", "\udcff"):
            file.write_bytes(wrong.encode(errors="surrogateescape"))
            assert addresses.look() == [Address("10.0.0.1", 7100)], "what was known stays"
        file.unlink()
        assert addresses.look() == [Address("10.0.0.1", 7100)]
        (tmp_path / "next").write_text("10.0.0.2:7100")
        os.rename(tmp_path / "next", file)
        assert addresses.look() == [Address("10.0.0.2", 7100)]
        file.write_text("")
        assert addresses.look() == []
    addresses.check_invariants()


def test_the_systems_resolver_knows_this_machine() -> None:
    assert "127.0.0.1" in resolve("localhost")
    assert resolve("127.0.0.1") == ["127.0.0.1"]


def test_a_rank_without_a_port_has_no_peer() -> None:
    names = Names(prefill=["10.0.0.1"])
    assert names.of("prefill:65535", rank=1).look() == []
