"""What it costs to know by name what a large pool holds."""

import statistics
import time
from typing import Any

import numpy as np

from offload.messages import Kept
from offload.naming import WIDTH_SHIFT
from offload.worker.peers.holdings import Holdings
from offload.worker.seals import SealTables

_STORE = 8192
"""Slots that come at once."""
_QUESTIONS = 200


def name_row(num_slots: int, rounds: int) -> dict[str, Any]:
    """Of a pool that is full, and then filled anew, in random order: seconds."""
    tables = SealTables.of_one(num_slots)
    holdings, rng = Holdings(tables, 1), np.random.default_rng(0)
    names = np.zeros((num_slots, 32), dtype=np.uint8)
    marks = np.full(_STORE, 32 << WIDTH_SHIFT)
    spent: list[float] = []
    job_id = 0
    for _ in range(1 + rounds):
        order = rng.permutation(num_slots)
        for start in range(0, num_slots - _STORE + 1, _STORE):
            job_id += 1
            slots = order[start : start + _STORE]
            names[slots] = rng.integers(0, 256, (_STORE, 32), dtype=np.uint8)
            tables.fills[slots] = job_id
            kept = Kept(slots, np.full(_STORE, job_id), names[slots], names[slots], marks)
            began = time.perf_counter()
            holdings.keep(kept)
            spent.append(time.perf_counter() - began)
    holdings.check_invariants()
    asked = {count: _asked(holdings, names[order[:count]]) for count in (1, _STORE)}
    return {
        "slots": num_slots,
        "row_us": statistics.mean(spent) / _STORE * 1e6,
        "longest": max(spent),
        "asked_one_us": asked[1] * 1e6,
        "asked_all_ms": asked[_STORE] * 1e3,
    }


def _asked(holdings: Holdings, names: np.ndarray) -> float:
    """Median seconds of a question for these, all of which are there."""
    spent = []
    for _ in range(_QUESTIONS):
        began = time.perf_counter()
        found = holdings.has(names)
        spent.append(time.perf_counter() - began)
        assert found.all()
    return statistics.median(spent)
