"""Ports that tests and benchmarks give to servers are nobody else's until then."""

import errno
import socket
from contextlib import ExitStack
from pathlib import Path

import pytest

from offload.fleet_config import Address
from offload.testing.engines.server import held_ports
from offload.worker.peers.server import listen


def test_ports_that_are_held_are_for_the_ranks_of_an_engine_alone() -> None:
    with ExitStack() as stack:
        held = [stack.enter_context(each) for each in held_ports(3)]
        ports = [each.getsockname()[1] for each in held]
        assert ports == list(range(ports[0], ports[0] + 3))
        assert ports[-1] < int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
        for rank, port in enumerate(ports):
            with pytest.raises(OSError, match="in use") as refused, socket.socket() as other:
                other.bind(("", port))
            assert refused.value.errno == errno.EADDRINUSE
            for _ in range(2):  # also after one that has listened there
                with listen(Address("127.0.0.1", ports[0]), rank):
                    socket.create_connection(("127.0.0.1", port), 30.0).close()
            with pytest.raises(ConnectionRefusedError):
                socket.create_connection(("127.0.0.1", port), 30.0)
