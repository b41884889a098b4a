"""A process with a pool in shared memory is killed at random moments; then all that is adopted is read back.

    python -m tests.crash_region [--kills 30] [--seed 0] [--json FILE]

A child adopts a region and looks whether each slot holds what its row says. Then it stores over it as fast
as it can, on several threads, as a worker does: the generation is taken away, bytes come, the slot is sealed,
and later its row is written. It tells its parent when a store begins, and when rows are written. The parent
kills it (SIGKILL) after a time of chance, at any stage: while it opens, adopts, stores, seals or writes rows.
Then the parent adopts the region itself. What was told as written and not begun to be overwritten must be
there, whole. What was begun may be there, whole, or be free. What a slot holds follows from its generation.

The exit status is 1 if bytes were wrong, a slot was lost, or more memory was taken than one region has.
"""

import argparse
import contextlib
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import xxhash

from benchmarks.common import report
from offload.messages import EPOCH_SHIFT, Fingerprint, Ids, Kept, WorkerFacts
from offload.worker.pool.region import RegionPlan
from offload.worker.replicas import ONE, Sharing, share_pool
from tests.killing import Moment, live_and_die

SLOTS, SLOT_BYTES = 64, 16384
FACTS = WorkerFacts(SLOTS, SLOT_BYTES, Fingerprint("", "", 1, 16, "", ""))
MOMENTS = [
    Moment(b"\n", 300, 0.003),
    Moment(b"\n", 300, 0.003),
    Moment(b"K", 60, 0.001),
    Moment(b"S adopt", 1, 0.02),
    Moment(b"S", 1, 0.05),
]
"""When a child is killed."""


@dataclass(slots=True)
class Knowledge:
    """What a parent knows of a region.

    Attributes:
        kept: by slot, the generation whose row was last told to be written.
        begun: slots that stores have begun to fill since.
        ever: by slot, all generations that were ever begun.
        epoch: the last that a child has told of.
    """

    kept: dict[int, int] = field(default_factory=dict)
    begun: set[int] = field(default_factory=set)
    ever: dict[int, set[int]] = field(default_factory=dict)
    epoch: int = 0


def content_of(generation: int, slot: int) -> Any:
    """What a slot holds, ``uint8[SLOT_BYTES]``."""
    rng = np.random.default_rng([generation, slot])
    return rng.integers(0, 1 << 63, SLOT_BYTES // 8, dtype=np.uint64).view(np.uint8)


def names_of(generations: Ids, slots: Ids) -> Any:
    """What a slot is called, ``uint8[n, 32]``."""
    return np.stack([generations, slots, ~generations, ~slots], axis=1).view(np.uint8)


def adopted(root: Path, counts: Counter[str]) -> tuple[Sharing, dict[int, int]]:
    """Open the region and look at all that it has; counts what is wrong."""
    began = time.perf_counter()
    held = share_pool(ONE, FACTS, plan=RegionPlan(root, "crash", 0, 1))
    counts["adoption_us"] += int(1e6 * (time.perf_counter() - began))
    assert held.lasting is not None and held.slots is not None and held.tables is not None
    kept = held.lasting.facts.kept
    counts["wrong"] += int((kept.names != names_of(kept.generations, kept.slots)).any(axis=1).sum())
    found = {}
    for slot, generation in zip(kept.slots.tolist(), kept.generations.tolist(), strict=True):
        raw = held.slots[slot * SLOT_BYTES : (slot + 1) * SLOT_BYTES]
        counts["read"] += 1
        if xxhash.xxh3_64_intdigest(raw) != held.tables.sums[slot]:
            counts["told_by_seals"] += 1
        elif raw != content_of(generation, slot).tobytes():
            counts["wrong"] += 1
        else:
            found[slot] = generation
    return held, found


# The child


def live(root: Path, seed: int, write_fd: int) -> NoReturn:
    """Store for ever, and tell of it. What is told is one line: a letter, and numbers."""

    def tell(*words: object) -> None:
        os.write(write_fd, (" ".join(map(str, words)) + "\n").encode())

    tell("S adopt")
    counts = Counter[str]()
    held, _ = adopted(root, counts)
    if counts["wrong"]:
        tell("X", counts["wrong"])
    lasting, tables, memory = held.lasting, held.tables, held.slots
    assert lasting is not None and tables is not None and memory is not None
    epoch, table = lasting.facts.epoch, lasting._table
    tell("E", epoch)
    tell("S store")
    rng = random.Random(seed)
    pool = np.frombuffer(memory, dtype=np.uint8, count=SLOTS * SLOT_BYTES).reshape(SLOTS, SLOT_BYTES)

    def store(generation: int, slots: list[int]) -> Kept:
        own = np.array(slots)
        for slot in slots:
            pool[slot] = content_of(generation, slot)
        tables.sums[own] = [xxhash.xxh3_64_intdigest(pool[slot]) for slot in slots]
        tables.fills[own] = generation
        generations = np.full(len(own), generation)
        return Kept(own, generations, names_of(generations, own), names_of(own, generations), own)

    with ThreadPoolExecutor(3) as threads, ThreadPoolExecutor(1) as keeper:
        for job in range(1, 1 << 30):
            free = list(range(SLOTS))
            rng.shuffle(free)
            jobs = []
            for number in range(rng.randint(1, 3)):
                slots = [free.pop() for _ in range(rng.randint(1, 8))]
                generation = epoch << EPOCH_SHIFT | 4 * job + number
                tell("B", generation, *slots)
                tables.fills[np.array(slots)] = -1
                jobs.append(threads.submit(store, generation, slots))
            for each in jobs:
                kept = each.result()
                keeper.submit(table.keep, kept).result()
                tell("K", int(kept.generations[0]), *kept.slots.tolist())
    os._exit(0)


# The parent


def kill_one(root: Path, knowledge: Knowledge, rng: random.Random) -> str:
    """One life of a child; returns the stage at which it was killed."""
    return take_in(live_and_die(live, (root,), MOMENTS, rng), knowledge)


def take_in(told: str, knowledge: Knowledge) -> str:
    """Note what a child has told; returns its last stage."""
    stage = "start"
    for line in told.splitlines():
        letter, *words = line.split()
        if letter == "S":
            stage = words[0]
        elif letter == "X":
            raise RuntimeError(f"a child has found {words[0]} slots with wrong bytes")
        elif letter == "E":
            if int(words[0]) <= knowledge.epoch:
                raise RuntimeError(f"epoch {words[0]} after {knowledge.epoch}")
            knowledge.epoch = int(words[0])
        else:
            generation, *slots = map(int, words)
            for slot in slots:
                if letter == "B":
                    knowledge.begun.add(slot)
                    knowledge.ever.setdefault(slot, set()).add(generation)
                else:
                    knowledge.kept[slot] = generation
                    knowledge.begun.discard(slot)
    return stage


def look(root: Path, knowledge: Knowledge, counts: Counter[str]) -> None:
    """Adopt the region, and compare it with what was told."""
    held, found = adopted(root, counts)
    assert held.lasting is not None
    if held.lasting.facts.epoch <= knowledge.epoch:
        raise RuntimeError(f"epoch {held.lasting.facts.epoch} after {knowledge.epoch}")
    knowledge.epoch = held.lasting.facts.epoch
    for slot in range(SLOTS):
        is_promised = slot in knowledge.kept and slot not in knowledge.begun
        if is_promised and found.get(slot) != knowledge.kept[slot]:
            counts["lost"] += 1
        if slot in found and found[slot] not in knowledge.ever[slot]:
            counts["wrong"] += 1  # nobody ever put that there
    counts["served"] += len(found)
    knowledge.kept, knowledge.begun = dict(found), set()
    regions = [path for path in root.iterdir() if path.is_dir()]
    taken = sum(512 * path.stat().st_blocks for path in root.glob("*/pool"))
    counts["too_much_memory"] += len(regions) != 1 or taken > SLOTS * (SLOT_BYTES + 96) + 8192
    held.lasting.close()


def lives(kills: int, seed: int, root: Path) -> Iterator[tuple[int, Counter[str]]]:
    """Kill so many times; yields what was counted so far after each."""
    rng = random.Random(seed)
    counts = Counter[str](wrong=0, lost=0, too_much_memory=0)
    knowledge = Knowledge()
    for number in range(kills):
        counts[f"killed_in_{kill_one(root, knowledge, rng)}"] += 1
        if rng.random() < 0.8 or number == kills - 1:  # if not, the next child adopts what this one left
            look(root, knowledge, counts)
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
    folder = Path(tempfile.mkdtemp(prefix="region-crash-", dir="/dev/shm"))
    try:
        with contextlib.suppress(KeyboardInterrupt):
            for number, counts in lives(options.kills, options.seed, folder / "kv-offload-pool"):
                if number % 50 == 0:
                    print(f"{number} kills, {counts['wrong']} wrong, {counts['lost']} lost", flush=True)
    finally:
        shutil.rmtree(folder)
    found = {"kills": options.kills, "seed": options.seed, **dict(sorted(counts.items()))}
    found["seconds"] = round(time.perf_counter() - began, 1)
    for name, value in found.items():
        print(f"{name:>22}  {value}")
    if options.json:
        options.json.write_text(json.dumps({"meta": report.meta(), **found}, indent=2) + "\n")
    return 1 if counts["wrong"] or counts["lost"] or counts["too_much_memory"] else 0


if __name__ == "__main__":
    sys.exit(main())
