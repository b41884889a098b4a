"""A peer in a process of its own, and beside it a plain socket that sends the same bytes.

    python -m benchmarks.peer_fetch.serving SLOTS SLOT_BYTES [--nixl]

It prints what ``Served`` has, as JSON, and serves until its input ends; with ``--nixl`` by NIXL, too.
"""

import json
import socket
import sys
import threading
from typing import NamedTuple

import numpy as np

from offload.fleet_config import Address
from offload.messages import Kept, Listening, Names
from offload.naming import WIDTH_SHIFT
from offload.worker.media.base import PoolSlots
from offload.worker.peers.listener import about_rank
from offload.worker.peers.nixl import expose
from offload.worker.peers.protocol import Memory
from offload.worker.peers.server import PeerServer, listen
from offload.worker.peers.shown import Shown
from offload.worker.pool.pages import take_pages
from offload.worker.pool.region import RegionShape
from offload.worker.pool.segment import Segment
from offload.worker.replicas import Share
from offload.worker.seals import SealTables, checksums_of

KEY, PEER, EPOCH, NAMESPACE = b"benchmark of fetches from peers.", b"prefill0", b"epoch000", "{}"
_SEND_BYTES = 8 << 20


class Served(NamedTuple):
    """Where it is.

    Attributes:
        port: of the peer.
        plain_port: of the plain socket: after each byte that it receives it sends all slots.
        memory: of the pool, as ``Memory`` has it.
    """

    port: int
    plain_port: int
    memory: list[int | str]


def chain(num_slots: int) -> Names:
    """Names of the positions that lie in the slots, one after the other."""
    return np.random.default_rng(0).integers(0, 256, (num_slots, 32), dtype=np.uint8)


def main() -> None:
    num_slots, slot_bytes = (int(each) for each in sys.argv[1:3])
    shape = RegionShape(num_slots, slot_bytes)
    segment = Segment.create(shape.slots_bytes + SealTables.num_bytes(num_slots))
    slots_map = segment.map(0, shape.slots_bytes)
    content = np.frombuffer(slots_map, dtype=np.uint8)[: num_slots * slot_bytes]
    take_pages(int(content.ctypes.data), shape.slots_bytes, is_shared=True)
    content.view(np.uint64)[:] = np.random.default_rng(1).integers(
        0, 1 << 63, len(content) // 8, dtype=np.uint64
    )
    tables = SealTables.over(segment.map(shape.slots_bytes, SealTables.num_bytes(num_slots)), num_slots)
    slots = PoolSlots(int(content.ctypes.data), num_slots, slot_bytes)
    tables.sums[:] = checksums_of(slots.addresses(np.arange(num_slots))[:, None], [slot_bytes])
    tables.fills[:] = 1
    where = segment.here
    memory = Memory(where.pid, where.fd, where.label, where.nbytes, num_slots)
    shown = Shown(about_rank(NAMESPACE, 0, 1, Share(), slot_bytes, 1, PEER), slots, tables, memory)
    exposed = expose(slots) if "--nixl" in sys.argv else None
    if exposed is not None:
        shown.reachable = exposed.reachable
    shown.begin(Listening(PEER, EPOCH, b""))
    names = chain(num_slots)
    parents = np.roll(names, 1, axis=0)
    parents[0] = 0
    marks = np.full(num_slots, 32 << WIDTH_SHIFT)
    shown.keep(Kept(np.arange(num_slots), np.ones(num_slots, dtype=np.int64), names, parents, marks))
    server = PeerServer(listen(Address("127.0.0.1", 0), 0), shown, KEY)
    plain = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=_send_plain, args=(plain, memoryview(content)), daemon=True).start()
    print(json.dumps(Served(server.port, plain.getsockname()[1], [*memory_of(memory)])), flush=True)
    sys.stdin.read()
    server.close(10)
    if exposed is not None:
        exposed.close()


def memory_of(memory: Memory) -> tuple[int, int, str, int, int]:
    """What it has, in order."""
    return memory.pid, memory.fd, memory.label, memory.nbytes, memory.num_slots


def _send_plain(listening: socket.socket, content: memoryview) -> None:
    connection, _ = listening.accept()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    while connection.recv(1):
        sent = 0
        while sent < len(content):
            sent += connection.send(content[sent : sent + _SEND_BYTES])


if __name__ == "__main__":
    main()
