"""A process with a real slab is killed at random moments; then everything is read back.

    python -m tests.crash [--kills 30] [--seed 0] [--json FILE]

A child opens a slab, checks what its log says is there, and puts extents over older ones as fast as it can.
It tells its parent of each extent before it is submitted, and again once it has been reported as good. The
parent kills it (SIGKILL) after a time of chance, at any stage: while it opens, recovers, puts, writes its log
anew or closes. Then it looks: what was reported and not begun to be overwritten must be there, whole. What
was begun may be there, whole, or be a miss. Anything else is wrong. What an extent holds follows from its
generation. Bytes go with O_DIRECT or through the page cache, and slots are aligned or not, in turns.

The exit status is 1 if bytes were wrong, or an extent was lost.
"""

import argparse
import contextlib
import json
import os
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np

from benchmarks.common import report
from offload.files.records import RecordLog
from offload.messages import EPOCH_SHIFT
from offload.worker.media.base import Extent, MediumJob, Verb
from offload.worker.media.slab import SlabMedium, SlabOptions
from tests.killing import Moment, live_and_die
from tests.offload.worker.media.bench import Pool

EXTENT, PLACES = 4, 24
MOMENTS = [
    *(Moment(b"\n", 400, 0.005),) * 6,
    *(Moment(b"S compaction", 3, 0.02),) * 2,
    *(Moment(b"S close", 2, 0.01), Moment(b"S", 1, 0.15)),
]
"""When a child is killed."""


class Kind(NamedTuple):
    """How a slab is made."""

    slot_bytes: int
    direct: bool


KINDS = [Kind(65536, True), Kind(65536, False), Kind(656 * 64, True), Kind(656 * 64, False)]


@dataclass(slots=True)
class Knowledge:
    """What a parent knows of a slab.

    Attributes:
        good: by place, the generation that was last reported as good.
        begun: by place, those that were begun since.
        ever: by place, all that were ever begun.
        epoch: the last that a child has told of.
    """

    good: dict[int, int] = field(default_factory=dict)
    begun: dict[int, list[int]] = field(default_factory=dict)
    ever: dict[int, set[int]] = field(default_factory=dict)
    epoch: int = 0


def content_of(generation: int, place: int, slot_bytes: int) -> Any:
    """What an extent holds, ``uint8[slots, slot_bytes]``. Its number of slots is of its generation, too."""
    rng = np.random.default_rng([generation, place])
    num_slots = int(rng.integers(1, EXTENT + 1))
    return rng.integers(0, 1 << 63, (num_slots, slot_bytes // 8), dtype=np.uint64).view(np.uint8)


def opened(path: Path, pool: Pool, kind: Kind) -> SlabMedium:
    options = SlabOptions(
        get_threads=2, put_threads=2, sync_seconds=0.02, spare_records=40, direct=kind.direct
    )
    return SlabMedium(
        path, pool.slots, namespace="crash", extent_slots=EXTENT, num_places=PLACES, options=options
    )


# The child


def live(path: Path, kind: Kind, seed: int, write_fd: int) -> NoReturn:
    """Put for ever, and tell of it. What is told is one line: a letter, and numbers."""

    def tell(*words: object) -> None:
        os.write(write_fd, (" ".join(map(str, words)) + "\n").encode())

    compact = RecordLog.compact

    def told_compact(log: RecordLog, records: Any) -> None:
        tell("S", "compaction")
        compact(log, records)
        tell("S", "put")

    RecordLog.compact = told_compact  # type: ignore[method-assign]
    rng = random.Random(seed)
    pool = Pool(kind.slot_bytes, PLACES * EXTENT)
    tell("S", "recovery")
    medium = opened(path, pool, kind)
    tell("E", medium.epoch)
    tell("S", "put")
    jobs: dict[int, list[tuple[int, int]]] = {}
    for job_id in range(1, 1 << 30):
        free = [place for place in range(PLACES) if all(place not in dict(job) for job in jobs.values())]
        places = rng.sample(free, min(len(free), rng.randint(1, 4)))
        generation = medium.epoch << EPOCH_SHIFT | job_id
        extents = []
        for place in places:
            content = content_of(generation, place, kind.slot_bytes)
            slots = np.arange(len(content)) + place * EXTENT
            pool.bytes[slots] = content
            extents.append(Extent(place, generation, slots, pool.seals(slots.tolist())))
            tell("B", place, generation)
        jobs[job_id] = [(place, generation) for place in places]
        medium.submit(MediumJob.of(job_id, Verb.PUT, extents))
        while True:
            for end in medium.poll():
                if end.error is not None:
                    tell("X", end.error)
                for place, its in jobs.pop(end.job_id)[: end.num_good]:
                    tell("G", place, its)
            if len(jobs) < 3:
                break
            time.sleep(0.0002)
        if job_id % 40 == 0 and rng.random() < 0.5:
            tell("S", "close")
            medium.close(10)
            for end in medium.poll():
                for place, its in jobs.pop(end.job_id)[: end.num_good]:
                    tell("G", place, its)
            tell("S", "recovery")
            medium = opened(path, pool, kind)
            tell("E", medium.epoch)
            tell("S", "put")
            jobs.clear()
    os._exit(0)


# The parent


def kill_one(path: Path, kind: Kind, knowledge: Knowledge, rng: random.Random) -> str:
    """One life of a child; returns the stage at which it was killed."""
    return take_in(live_and_die(live, (path, kind), MOMENTS, rng), knowledge)


def take_in(told: str, knowledge: Knowledge) -> str:
    """Note what a child has told; returns its last stage."""
    stage = "start"
    for line in told.splitlines():
        letter, *words = line.split(maxsplit=2 if line[0] in "BG" else 1)
        if letter == "S":
            stage = words[0]
        elif letter == "E":
            if int(words[0]) <= knowledge.epoch:
                raise RuntimeError(f"epoch {words[0]} after {knowledge.epoch}")
            knowledge.epoch = int(words[0])
        elif letter == "X":
            raise RuntimeError(f"a job failed: {words[0]}")
        elif letter == "B":
            place, generation = map(int, words)
            knowledge.begun.setdefault(place, []).append(generation)
            knowledge.ever.setdefault(place, set()).add(generation)
        elif letter == "G":
            place, generation = map(int, words)
            knowledge.good[place] = generation
            knowledge.begun[place].remove(generation)
    return stage


def look(path: Path, kind: Kind, knowledge: Knowledge, counts: Counter[str]) -> None:
    """Open the slab and read all that may be there."""
    pool = Pool(kind.slot_bytes, EXTENT)
    began = time.perf_counter()
    medium = opened(path, pool, kind)
    counts["recovery_us"] += int(1e6 * (time.perf_counter() - began))
    if medium.epoch <= knowledge.epoch:
        raise RuntimeError(f"epoch {medium.epoch} after {knowledge.epoch}")
    knowledge.epoch = medium.epoch
    kept = medium.recover()
    by_place = dict(zip(kept.places.tolist(), kept.generations.tolist(), strict=True))
    for place in range(PLACES):
        begun = knowledge.begun.pop(place, [])
        promised = None if begun else knowledge.good.get(place)
        found = by_place.get(place)
        if found is not None and found not in knowledge.ever.get(place, ()):
            counts["wrong"] += 1  # nobody ever put that there
        is_there = found is not None and _is_there(medium, pool, place, found, counts)
        counts["read"] += 1
        if promised is not None and not (is_there and found == promised):
            counts["lost"] += 1
        if found is not None and not is_there:
            counts["told_by_seals"] += 1
        knowledge.good.pop(place, None)
        if is_there and found is not None:
            knowledge.good[place] = found
    if not medium.close(30):
        raise RuntimeError("it did not close")


def _is_there(medium: SlabMedium, pool: Pool, place: int, generation: int, counts: Counter[str]) -> bool:
    """Whether it is served; counts it as wrong if it is, and is not what was put."""
    content = content_of(generation, place, pool.slots.slot_bytes)
    pool.bytes[:] = 0xEE
    slots = np.arange(len(content))
    medium.submit(MediumJob.of(1, Verb.GET, [Extent(place, generation, slots)]))
    while not (ended := medium.poll()):
        time.sleep(0.0001)
    if not ended[0].num_good:
        return False
    counts["served"] += 1
    if not np.array_equal(pool.bytes[slots], content):
        counts["wrong"] += 1
    return True


def lives(kills: int, seed: int, folder: Path) -> Iterator[tuple[int, Counter[str]]]:
    """Kill so many times; yields what was counted so far after each."""
    rng = random.Random(seed)
    counts = Counter[str](wrong=0, lost=0)
    known = [Knowledge() for _ in KINDS]
    for number in range(kills):
        which = number % len(KINDS)
        path = folder / f"slab{which}"
        stage = kill_one(path, KINDS[which], known[which], rng)
        counts[f"killed_in_{stage}"] += 1
        if rng.random() < 0.8 or number >= kills - len(KINDS):  # if not, the next child recovers
            look(path, KINDS[which], known[which], counts)
            counts["looks"] += 1
        yield number + 1, counts


def main(arguments: list[str] | None = None) -> int:
    """Kill and look; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--kills", type=int, default=30, metavar="N", help="children to kill (default: 30)")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of all that is drawn (default: 0)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the counts there")
    options = parser.parse_args(arguments)
    began, counts = time.perf_counter(), Counter[str]()
    with tempfile.TemporaryDirectory() as folder, contextlib.suppress(KeyboardInterrupt):
        for number, counts in lives(options.kills, options.seed, Path(folder)):
            if number % 50 == 0:
                print(f"{number} kills, {counts['wrong']} wrong, {counts['lost']} lost", flush=True)
    found = {"kills": options.kills, "seed": options.seed, **dict(sorted(counts.items()))}
    found["seconds"] = round(time.perf_counter() - began, 1)
    for name, value in found.items():
        print(f"{name:>22}  {value}")
    if options.json:
        options.json.write_text(json.dumps({"meta": report.meta(), **found}, indent=2) + "\n")
    return 1 if counts["wrong"] or counts["lost"] else 0


if __name__ == "__main__":
    sys.exit(main())
