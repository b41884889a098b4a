"""How fast do extents move between the pool and a store, and how fast are names found there?

    python -m benchmarks.store_tier [--rounds 9] [--mib 128] [--names 4096] [--json FILE]

A Redis is started, which keeps nothing on disk, and a Mooncake Store where that is installed: a master, and
a process with memory. The product's medium puts extents of 15 slots of 128 KiB, and gets them back: over a
socket in the file system and over TCP, and with Mooncake in calls of 8 extents and of one, over TCP. What is
put and got is checked against its seals, as always. Then it looks for so many names of which three quarters
are there, as it does when a request comes. `one by one` asks for each of them, in one go.

Ways take turns; medians count. Seconds are from the first job submitted to the last end polled. CPU seconds
are this process's, of all threads.
"""

from __future__ import annotations

import argparse
import ctypes
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.common import report
from benchmarks.common.arguments import parser_of, positive, settings_of
from benchmarks.common.tables import Column, table
from benchmarks.store_tier.mooncake import binary_of_master, mooncake_store, put_names
from offload.messages import Names
from offload.mooncake_config import MooncakeConfig
from offload.store_config import StoreAddress
from offload.testing.engines.server import held_port
from offload.worker.media.base import Medium, MediumEnd, MediumJob, PoolSlots, Verb
from offload.worker.media.mooncake import MooncakeClient
from offload.worker.media.mooncake_medium import MooncakeMedium, MooncakeOptions
from offload.worker.media.resp import Connection
from offload.worker.media.resp_medium import RespMedium, RespOptions
from offload.worker.media.store_names import Whose
from offload.worker.pool.memory import HostMemory
from offload.worker.seals import checksums_of

__all__ = ["main"]

_SLOT_BYTES = 128 << 10
_EXTENT_SLOTS = 15
_JOB_EXTENTS = 8
_WHOSE = Whose("benchmark", "0")
_POLL_SECONDS = 1e-4
_WAIT_SECONDS = 30.0
_PATIENT = RespOptions(
    connect_seconds=_WAIT_SECONDS, io_seconds=_WAIT_SECONDS, hang_seconds=2 * _WAIT_SECONDS
)
"""A store that a busy machine holds up for a while is slow, and is measured as that."""

_COLUMNS = [
    *(Column("what", "what"), Column("way", "way")),
    *(Column(name, key, ".2f") for name, key in (("GB/s", "gb_per_s"), ("least", "least"), ("most", "most"))),
    Column("CPU s per GB", "cpu_s_per_gb", ".2f"),
    Column("ms", "ms", ".2f"),
]


class _Way(NamedTuple):
    """To a store.

    Attributes:
        make: a medium over it.
        clear: deletes all that is there.
    """

    make: Callable[[PoolSlots], Medium]
    clear: Callable[[], None]


class _Bench:
    """A pool of random bytes, and a medium over a server."""

    def __init__(self, way: _Way, num_extents: int) -> None:
        num_slots = num_extents * _EXTENT_SLOTS
        self._memory = HostMemory(num_slots, _SLOT_BYTES)
        pool = PoolSlots(self._memory.address, num_slots, _SLOT_BYTES)
        slots = (ctypes.c_uint8 * self._memory.nbytes).from_address(pool.address)
        self._bytes = np.frombuffer(slots, dtype=np.uint8)
        self._bytes[:] = np.random.default_rng(0).integers(0, 256, len(self._bytes), dtype=np.uint8)
        self._seals = checksums_of(pool.addresses(np.arange(num_slots))[:, None], [_SLOT_BYTES])
        self._num_extents = num_extents
        self.names = np.random.default_rng(1).integers(0, 256, (num_extents, 32), dtype=np.uint8)
        self.medium = way.make(pool)
        self.clear = way.clear

    def turn(self, verb: Verb, suffix: bytes) -> dict[str, float]:
        """Move all extents; GB per second, and CPU seconds per GB."""
        jobs = [
            self._job(verb, start, min(start + _JOB_EXTENTS, self._num_extents), suffix)
            for start in range(0, self._num_extents, _JOB_EXTENTS)
        ]
        cpu, began = time.process_time(), time.perf_counter()
        ends = _run(self.medium, jobs)
        seconds, cpu = time.perf_counter() - began, time.process_time() - cpu
        assert all(end.error is None for end in ends), [end.error for end in ends if end.error]
        nbytes = len(self._bytes)
        return {"gb_per_s": nbytes / seconds / 1e9, "cpu_s_per_gb": cpu / nbytes * 1e9}

    def search(self, names: Names) -> tuple[int, float]:
        """How many leading ones are there, and seconds until that is known."""
        count = len(names)
        zeros = np.zeros(count, dtype=np.int64)
        none = np.empty(0, dtype=np.int64)
        job = MediumJob(
            0, Verb.PROBE, zeros, zeros + 1, np.zeros(count + 1, dtype=np.int64), none, names=names
        )
        began = time.perf_counter()
        [end] = _run(self.medium, [job])
        return end.num_good, time.perf_counter() - began

    def close(self) -> None:
        self.medium.close(_WAIT_SECONDS)
        self._memory.close()

    def _job(self, verb: Verb, start: int, stop: int, suffix: bytes) -> MediumJob:
        slots = np.arange(start * _EXTENT_SLOTS, stop * _EXTENT_SLOTS)
        ones = np.ones(stop - start, dtype=np.int64)
        return MediumJob(
            start,
            verb,
            ones,
            ones,
            np.arange(stop - start + 1) * _EXTENT_SLOTS,
            slots,
            self._seals[slots] if verb is Verb.PUT else None,
            names=self.names[start:stop],
            depths=np.arange(start, stop),
            suffix=suffix,
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print a table and write rows; returns 0, or 1 if there is no server."""
    options = _parser().parse_args(arguments)
    if shutil.which(options.server) is None:
        print(f"{options.server} is not installed (Debian: apt-get install redis-server)")
        return 1
    notes = report.load_note()
    num_extents = max(1, (options.mib << 20) // (_EXTENT_SLOTS * _SLOT_BYTES))
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        urls = stack.enter_context(_server(options.server, folder))
        ways = {way: _resp(url) for way, url in urls.items()}
        store, binary = None, binary_of_master()
        if binary is None:
            notes.append("Mooncake is not installed (pip install mooncake-transfer-engine-non-cuda)")
        else:
            num_bytes = max(256 << 20, 4 * options.mib << 20)
            store = stack.enter_context(mooncake_store(binary, folder, num_bytes))
            ways |= {"Mooncake": _mooncake(store, 8), "Mooncake, one by one": _mooncake(store, 1)}
        rows = _moves(ways, num_extents, options.rounds)
        rows += _searches(urls["socket"], options.names, options.rounds)
        if store is not None:
            rows += _mooncake_searches(store, options.names, options.rounds)
    print(table(_COLUMNS, rows))
    print()
    for note in notes:
        print(note)
    report.write(options.json, rows, settings=settings_of(options), notes=notes)
    return 0


def _resp(url: str) -> _Way:
    def make(pool: PoolSlots) -> Medium:
        address = StoreAddress.of(url)
        return RespMedium(address, pool, whose=_WHOSE, extent_slots=_EXTENT_SLOTS, options=_PATIENT)

    return _Way(make, partial(_delete, url))


def _mooncake(store: MooncakeConfig, most_extents: int) -> _Way:
    options = MooncakeOptions(most_extents=most_extents)
    client = MooncakeClient(store)

    def make(pool: PoolSlots) -> Medium:
        return MooncakeMedium(store, pool, whose=_WHOSE, extent_slots=_EXTENT_SLOTS, options=options)

    return _Way(make, lambda: _cleared(client))


def _cleared(client: MooncakeClient) -> None:
    assert client.remove_matching(".*") >= 0


def _moves(ways: dict[str, _Way], num_extents: int, rounds: int) -> list[dict[str, Any]]:
    benches = {name: _Bench(way, num_extents) for name, way in ways.items()}
    found: dict[tuple[Verb, str], list[dict[str, float]]] = {}
    for number in range(-1, rounds):
        for way, bench in benches.items():
            suffix = f"{way} {number}".encode()
            for verb in (Verb.PUT, Verb.GET):
                turn = bench.turn(verb, suffix)
                if number >= 0:
                    found.setdefault((verb, way), []).append(turn)
            bench.clear()
    for bench in benches.values():
        bench.close()
    return [_row(verb.value, way, turns) for (verb, way), turns in found.items()]


def _row(what: str, way: str, turns: Sequence[dict[str, float]]) -> dict[str, Any]:
    speeds = [turn["gb_per_s"] for turn in turns]
    return {
        "what": what,
        "way": way,
        "gb_per_s": statistics.median(speeds),
        "least": min(speeds),
        "most": max(speeds),
        "cpu_s_per_gb": statistics.median(turn["cpu_s_per_gb"] for turn in turns),
        "ms": None,
    }


def _searches(url: str, num_names: int, rounds: int) -> list[dict[str, Any]]:
    """Names of which three quarters are there."""
    bench = _Bench(_resp(url), 1)
    names = np.random.default_rng(2).integers(0, 256, (num_names, 32), dtype=np.uint8)
    num_there = num_names * 3 // 4
    keys = [_WHOSE.prefix + name.tobytes().hex().encode() for name in names]
    connection = Connection(StoreAddress.of(url))
    for key in keys[:num_there]:
        connection.call(b"SET", key, b"")

    def ask_all() -> int:
        connection.send([(b"EXISTS", key) for key in keys])
        return sum(connection.reply() == 1 for _ in keys)

    rows = _timed_searches(bench, names, num_there, ask_all, rounds, ("search", "one by one"))
    connection.close()
    return rows


def _mooncake_searches(store: MooncakeConfig, num_names: int, rounds: int) -> list[dict[str, Any]]:
    """The same there."""
    bench = _Bench(_mooncake(store, 8), 1)
    names = np.random.default_rng(2).integers(0, 256, (num_names, 32), dtype=np.uint8)
    num_there = num_names * 3 // 4
    keys = [_WHOSE.prefix.decode() + name.tobytes().hex() for name in names]
    client = MooncakeClient(store)
    put_names(client, keys[:num_there])
    ways = ("search, Mooncake", "one by one, Mooncake")
    return _timed_searches(bench, names, num_there, lambda: sum(client.exist(keys)), rounds, ways)


def _timed_searches(
    bench: _Bench,
    names: Names,
    num_there: int,
    ask_all: Callable[[], int],
    rounds: int,
    ways: tuple[str, str],
) -> list[dict[str, Any]]:
    """Milliseconds of the medium's search, and of asking for all in one go."""
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for number in range(-1, rounds):
        found, took = bench.search(names)
        assert found == num_there, f"{found} found, {num_there} are there"
        began = time.perf_counter()
        num_found = ask_all()
        took_all = time.perf_counter() - began
        assert num_found == num_there
        if number >= 0:
            seconds[ways[0]].append(took)
            seconds[ways[1]].append(took_all)
    bench.close()
    empty = {"gb_per_s": None, "least": None, "most": None, "cpu_s_per_gb": None}
    return [
        {"what": f"{len(names)} names", "way": way, **empty, "ms": 1000 * statistics.median(each)}
        for way, each in seconds.items()
    ]


def _run(medium: Medium, jobs: Sequence[MediumJob]) -> list[MediumEnd]:
    for job in jobs:
        medium.submit(job)
    ends: list[MediumEnd] = []
    while len(ends) < len(jobs):
        time.sleep(_POLL_SECONDS)
        ends += medium.poll()
    return ends


def _delete(url: str) -> None:
    """This server is ours alone."""
    connection = Connection(StoreAddress.of(url))
    connection.call(b"FLUSHALL")
    connection.close()


@contextmanager
def _server(binary: str, folder: Path) -> Iterator[dict[str, str]]:
    """Run a server; its URLs by way."""
    held = held_port()
    port = held.getsockname()[1]
    path = folder / "socket"
    arguments = ["--unixsocket", str(path), "--port", str(port), "--save", "", "--appendonly", "no"]
    server = subprocess.Popen([binary, *arguments, "--dir", str(folder)], stdout=subprocess.DEVNULL)
    try:
        until = time.monotonic() + _WAIT_SECONDS
        while not path.exists():
            assert server.poll() is None and time.monotonic() < until, f"{binary} does not start"
            time.sleep(0.01)
        yield {"socket": f"unix://{path}", "TCP": f"redis://127.0.0.1:{port}"}
    finally:
        server.kill()
        server.wait(_WAIT_SECONDS)
        held.close()


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("store_tier", __doc__)
    add = parser.add_argument
    add("--server", default="redis-server", metavar="FILE", help="that is started (default: redis-server)")
    add("--rounds", type=positive, default=9, metavar="N", help="that count (default: 9)")
    add("--mib", type=positive, default=128, metavar="M", help="moved in a turn (default: 128)")
    add("--names", type=positive, default=4096, metavar="N", help="looked for (default: 4096)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
