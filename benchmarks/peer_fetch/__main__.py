"""How fast does KV come from a peer's pool, beside what the machine can do?

    python -m benchmarks.peer_fetch [--mib 256] [--pairs 15] [--slots 1000000] [--rounds 3] [--nixl]
        [--json FILE]

A peer serves a pool from a process of its own. All of it is fetched into another pool, checked as always, in
turns with: a plain socket whose bytes are received and then taken a checksum of, in one thread; copies from
the same shared memory, with the product's own checksum behind each slot and without. Medians, in GB/s, and
the fetch as a share of what stands beside it. With ``--nixl`` it is fetched by NIXL, too:
over what ``UCX_TLS`` leaves, which on one machine is memory or TCP, and no RDMA.

Then a large pool is filled and filled anew, and what it holds is kept by name: what that costs for each slot,
the longest time that it took at once, and how long questions take.
"""

from __future__ import annotations

import ctypes
import json
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from benchmarks.common import report
from benchmarks.common.arguments import add_numbers, parser_of, settings_of
from benchmarks.common.tables import Column, table
from benchmarks.peer_fetch.names import name_row
from benchmarks.peer_fetch.serving import KEY, NAMESPACE, Served, chain
from offload.messages import Names
from offload.worker.media.base import MediumEnd, MediumJob, PoolSlots, Verb
from offload.worker.media.peers import PeerMedium
from offload.worker.peers.fetching import FetchPlan, peer_medium
from offload.worker.peers.near import NearPool
from offload.worker.peers.protocol import Memory
from offload.worker.pool.memory import HostMemory
from offload.worker.replicas import Share
from offload.worker.seals import checksums_of

__all__ = ["main"]

_SIZES = (128 << 10, 2 << 20)
_EXTENT_BYTES = 2 << 20
_JOB_BYTES = 16 << 20
_RECEIVE_BYTES = 2 << 20
_COLUMNS = (
    Column("KiB of a slot", "slot_kib"),
    Column("over TCP, GB/s", "tcp", ".2f"),
    Column("plain socket and checksum", "plain", ".2f"),
    Column("share", "tcp_share", ".0%"),
    Column("from memory, GB/s", "memory", ".2f"),
    Column("memcpy and checksum", "copied_checked", ".2f"),
    Column("share", "memory_share", ".0%"),
    Column("memcpy alone", "copied", ".2f"),
    Column("by NIXL", "nixl", ".2f"),
)
_NAME_COLUMNS = (
    Column("slots", "slots", ","),
    Column("a row, us", "row_us", ".2f"),
    Column("longest at once, s", "longest", ".2f"),
    Column("a question of 1 name, us", "asked_one_us", ".0f"),
    Column("of 8,192, ms", "asked_all_ms", ".1f"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and print its table; returns the exit code."""
    parser = parser_of("peer_fetch", __doc__)
    add_numbers(
        parser,
        ("mib", 256, "of the pool"),
        ("pairs", 15, "that are measured"),
        ("slots", 1_000_000, "of the large pool"),
        ("rounds", 3, "that it is filled anew"),
    )
    parser.add_argument("--nixl", action="store_true", help="fetch by NIXL, too")
    options = parser.parse_args(argv)
    notes = report.load_note()
    rows = [_row(options.mib << 20, size, options.pairs, options.nixl) for size in _SIZES]
    print(table(_COLUMNS, rows))
    named = name_row(options.slots, options.rounds)
    print(table(_NAME_COLUMNS, [named]))
    for note in notes:
        print(note)
    report.write(options.json, [*rows, named], settings=settings_of(options), notes=notes)
    return 0


def _row(num_bytes: int, slot_bytes: int, pairs: int, has_nixl: bool) -> dict[str, Any]:
    num_slots = num_bytes // slot_bytes
    command = [sys.executable, "-m", "benchmarks.peer_fetch.serving", str(num_slots), str(slot_bytes)]
    command += ["--nixl"] * has_nixl
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        while not (line := process.stdout.readline()).startswith("["):  # libraries speak there, too
            assert line, "the peer does not start"
        served = Served(*json.loads(line))
        bench = _Bench(served, num_slots, slot_bytes, has_nixl)
        ways: dict[str, Callable[[], None]] = {
            "tcp": lambda: bench.fetch(bench.far),
            "plain": bench.receive,
            "memory": lambda: bench.fetch(bench.near),
            "copied_checked": lambda: bench.copy(is_checked=True),
            "copied": lambda: bench.copy(is_checked=False),
        }
        if has_nixl:
            ways["nixl"] = lambda: bench.fetch(bench.nixl)
        spent: dict[str, list[float]] = {name: [] for name in ways}
        for turn in range(pairs + 1):
            names = list(ways)
            for name in names if turn % 2 else names[::-1]:
                began = time.perf_counter()
                ways[name]()
                if turn:  # the first has pages and connections to be made
                    spent[name].append(time.perf_counter() - began)
        bench.close()
        process.stdin.close()
    speed = {name: num_bytes / statistics.median(seconds) / 1e9 for name, seconds in spent.items()}
    shares = {
        "tcp_share": statistics.median(b / a for a, b in zip(spent["tcp"], spent["plain"], strict=True)),
        "memory_share": statistics.median(
            b / a for a, b in zip(spent["memory"], spent["copied_checked"], strict=True)
        ),
    }
    return {"slot_kib": slot_bytes >> 10, "nixl": None, **speed, **shares, "seconds": spent}


class _Bench:
    """A pool that is filled in all these ways."""

    def __init__(self, served: Served, num_slots: int, slot_bytes: int, has_nixl: bool) -> None:
        self._memory = HostMemory(num_slots, slot_bytes)
        self._slots = PoolSlots(self._memory.address, num_slots, slot_bytes)
        self._names = chain(num_slots)
        pid, fd, label, nbytes, _ = served.memory
        self._near = NearPool(Memory(int(pid), int(fd), str(label), int(nbytes), num_slots), slot_bytes)
        plan = FetchPlan(
            peers=(f"127.0.0.1:{served.port}",),
            rank=0,
            world_size=1,
            namespace=NAMESPACE,
            columns=1,
            key=KEY,
        )
        self.near = peer_medium(plan, self._slots, Share())
        self.far = peer_medium(plan, self._slots, Share())
        self.nixl = peer_medium(replace(plan, has_nixl=has_nixl), self._slots, Share())
        over = "nixl" if has_nixl else "tcp"
        for medium, transport in ((self.near, "memory"), (self.far, "tcp"), (self.nixl, over)):
            peers = _until_up(medium)
            for peer in peers if transport != "memory" else []:
                peer._shortcuts.map(None)
                peer._shortcuts.map = lambda memory: None  # type: ignore[method-assign]
                peer._drop_idle()
                peer.ask(lambda client: client.ping())
            assert medium.statuses()[0].transport == transport, medium.statuses()
        self._plain = socket.create_connection(("127.0.0.1", served.plain_port))
        self._plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        content = (ctypes.c_uint8 * (num_slots * slot_bytes)).from_address(self._memory.address)
        self._bytes = memoryview(content).cast("B")
        self._all = np.arange(num_slots)

    def fetch(self, medium: PeerMedium) -> None:
        """All of it, by the product: jobs of extents, as the scheduler's side orders them."""
        size, num_slots = self._slots.slot_bytes, self._slots.num_slots
        per_extent, per_job = max(1, _EXTENT_BYTES // size), max(1, _JOB_BYTES // size)
        has_ended = threading.Event()
        medium.runner.on_end = has_ended.set
        jobs = range(0, num_slots, per_job)
        for start in jobs:
            stop = min(start + per_job, num_slots)
            edges = np.append(np.arange(start, stop, per_extent), stop)
            medium.submit(_job(start, self._names[edges[1:] - 1], edges - start, self._all[start:stop]))
        ends: list[MediumEnd] = []
        while len(ends) < len(jobs):
            has_ended.wait(1)
            has_ended.clear()
            ends += medium.poll()
        assert sum(end.nbytes for end in ends) == num_slots * size, ends

    def receive(self) -> None:
        """All of it from a plain socket, and checksums, in one thread."""
        self._plain.send(b"x")
        size = self._slots.slot_bytes
        per_piece = max(1, _RECEIVE_BYTES // size)
        for start in range(0, self._slots.num_slots, per_piece):
            slots = self._all[start : start + per_piece]
            at, stop = start * size, (start + len(slots)) * size
            while at < stop:
                at += self._plain.recv_into(self._bytes[at:stop])
            self._check(slots)

    def copy(self, *, is_checked: bool) -> None:
        """All of it from the peer's memory, in one thread."""
        size = self._slots.slot_bytes
        for slot in range(self._slots.num_slots):
            ctypes.memmove(self._slots.address + slot * size, self._near.slots.address + slot * size, size)
            if is_checked:
                self._check(self._all[slot : slot + 1])

    def close(self) -> None:
        for medium in (self.near, self.far, self.nixl):
            assert medium.close(10)
        self._plain.close()
        del self._bytes
        self._memory.close()

    def _check(self, slots: np.ndarray) -> None:
        checksums_of(self._slots.addresses(slots)[:, None], [self._slots.slot_bytes])


def _until_up(medium: PeerMedium) -> list[Any]:
    until = time.monotonic() + 10
    while not (peers := medium.fleet.up(b"")):
        assert time.monotonic() < until, medium.statuses()
        time.sleep(0.01)
    return peers


def _job(job_id: int, names: Names, starts: np.ndarray, slots: np.ndarray) -> MediumJob:
    ones = np.ones(len(names), dtype=np.int64)
    return MediumJob(job_id, Verb.GET, ones, ones, starts, slots, names=names)


if __name__ == "__main__":
    sys.exit(main())
