"""How fast one engine has what another beside it has in its pool."""

import shutil
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np

from offload.messages import EPOCH_SHIFT, Fingerprint, Kept, Names, WorkerFacts
from offload.naming import WIDTH_SHIFT
from offload.worker.media.base import MediumEnd, MediumJob, PoolSlots, Verb
from offload.worker.media.siblings import SiblingMedium
from offload.worker.pool.region import RegionPlan
from offload.worker.pool.siblings import Siblings
from offload.worker.replicas import ONE, Sharing, share_pool
from offload.worker.seals import checksums_of

_EXTENT_BYTES = 1 << 20
_JOB_BYTES = 16 << 20
_MOST_NAMES = 8192


def fetch_row(path: str, num_bytes: int, slot_bytes: int, times: int) -> dict[str, float]:
    """Medians: seconds of the first question, seconds per GiB of a fetch and of a copy."""
    facts = WorkerFacts(num_bytes // slot_bytes, slot_bytes, Fingerprint("", "", 1, 16, "", ""))
    folder = Path(tempfile.mkdtemp(prefix="pool-beside-", dir=path))
    plan = RegionPlan(folder, "benchmark", 0, 1)
    spent: dict[str, list[float]] = {"asked": [], "fetched": [], "copied": []}
    try:
        owner, reader = share_pool(ONE, facts, plan=plan), share_pool(ONE, facts, plan=plan)
        names = _fill(owner, facts)
        for _ in range(times):
            _once(owner, reader, facts, names, spent)
        for each in (owner, reader):
            assert each.lasting is not None
            each.lasting.close()
    finally:
        shutil.rmtree(folder)
    gib = facts.num_slots * slot_bytes / (1 << 30)
    found = {name: statistics.median(seconds) for name, seconds in spent.items()}
    return found | {name: found[name] / gib for name in ("fetched", "copied")}


def _once(
    owner: Sharing, reader: Sharing, facts: WorkerFacts, names: Names, spent: dict[str, list[float]]
) -> None:
    assert owner.slots is not None and reader.slots is not None and reader.lasting is not None
    theirs, ours = (np.frombuffer(each.slots, dtype=np.uint8) for each in (owner, reader))
    pool = PoolSlots(int(ours.ctypes.data), facts.num_slots, facts.slot_bytes)
    medium = SiblingMedium(Siblings(reader.lasting.home, 1), pool)
    began = time.perf_counter()
    medium.submit(_job(0, Verb.PROBE, names[:_MOST_NAMES], np.arange(len(names[:_MOST_NAMES]) + 1)))
    [end] = _ends(medium, 1)
    spent["asked"].append(time.perf_counter() - began)
    assert end.num_good == min(len(names), _MOST_NAMES), end

    positions = max(1, _EXTENT_BYTES // facts.slot_bytes)
    per_job = _JOB_BYTES // facts.slot_bytes
    began = time.perf_counter()
    starts = range(0, facts.num_slots, per_job)
    for start in starts:
        stop = min(start + per_job, facts.num_slots)
        edges = np.append(np.arange(start, stop, positions), stop)
        medium.submit(_job(start, Verb.GET, names[edges[1:] - 1], edges - start, np.arange(start, stop)))
    ends = _ends(medium, len(starts))
    spent["fetched"].append(time.perf_counter() - began)
    assert not [end for end in ends if end.error], ends
    assert sum(end.nbytes for end in ends) == facts.num_slots * facts.slot_bytes
    medium.close(10)

    num_bytes = facts.num_slots * facts.slot_bytes
    began = time.perf_counter()
    ours[:num_bytes] = theirs[:num_bytes]
    spent["copied"].append(time.perf_counter() - began)


def _job(
    job_id: int, verb: Verb, names: Names, starts: np.ndarray, slots: np.ndarray | None = None
) -> MediumJob:
    ones = np.ones(len(names), dtype=np.int64)
    if slots is None:
        starts, slots = np.zeros_like(starts), np.empty(0, dtype=np.int64)
    return MediumJob(job_id, verb, ones, ones, starts, slots, names=names)


def _ends(medium: SiblingMedium, num_jobs: int) -> list[MediumEnd]:
    ends: list[MediumEnd] = []
    while len(ends) < num_jobs:
        ends += medium.poll()
        time.sleep(0.0001)
    return ends


def _fill(held: Sharing, facts: WorkerFacts) -> Names:
    """One chain of random bytes in all slots; returns its names."""
    assert held.lasting is not None and held.tables is not None and held.slots is not None
    rng, slots = np.random.default_rng(0), np.arange(facts.num_slots)
    content = np.frombuffer(held.slots, dtype=np.uint8)
    for slot in slots.tolist():
        content[slot * facts.slot_bytes :][: facts.slot_bytes] = rng.integers(
            0, 256, facts.slot_bytes, dtype=np.uint8
        )
    addresses = content.ctypes.data + slots * facts.slot_bytes
    generations = held.lasting.facts.epoch << EPOCH_SHIFT | slots // 100
    names = rng.integers(0, 256, (facts.num_slots, 32), dtype=np.uint8)
    parents = np.roll(names, 1, axis=0)
    parents[0] = 0
    held.tables.sums[slots] = checksums_of(addresses[:, None], [facts.slot_bytes])
    held.tables.fills[slots] = generations
    held.lasting._table.keep(Kept(slots, generations, names, parents, np.full(len(slots), 32 << WIDTH_SHIFT)))
    return names
