"""Loads that wait for what other ranks fill of a pool that all share."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import pytest

from offload.messages import LOAD, Ids
from offload.testing.copiers.faulty import FaultyCopier
from offload.worker.elsewhere import Elsewhere
from offload.worker.jobs import TransferJob
from offload.worker.lanes import gpu_lanes
from offload.worker.layout import BlockLayout, Region
from offload.worker.seals import Seals, SealTables

NUM_SLOTS = 8
SLOTS = np.arange(4, 8)
FILLS = np.array([1, 1, 2, 2])
SECONDS = 30.0


class Ranks(NamedTuple):
    """Two ranks' seals over the same tables; the first one's loads."""

    mine: Seals
    theirs: Seals
    elsewhere: Elsewhere
    load: TransferJob


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    """Slots were filled by job 0 once; of jobs 1 and 2 the other rank fills all. Load 9 reads them."""
    layout = BlockLayout([Region(0, 64, 64)], 0)
    tables = SealTables.of_one(NUM_SLOTS)
    tables.fills[:] = 0
    mine, theirs = (Seals(layout, NUM_SLOTS, tables=tables) for _ in range(2))
    elsewhere = Elsewhere(mine, SECONDS)
    elsewhere.began(1, 100.0)
    elsewhere.began(2, 100.0)
    lane = next(lane for lane in gpu_lanes(layout, FaultyCopier(layout)) if lane.route == LOAD)
    load = TransferJob(lane, SLOTS, np.arange(4), 100.0, FILLS, None, np.arange(4), 4)
    elsewhere.wait(9, load)
    yield Ranks(mine, theirs, elsewhere, load)
    elsewhere.check_invariants()


def fill(seals: Seals, job_id: int, slots: Ids) -> None:
    seals.adopt(job_id, slots, np.zeros(len(slots), dtype=np.uint64))


@pytest.mark.parametrize("order", [(1, 2), (2, 1)])
def test_a_load_waits_until_others_have_filled_all(ranks: Ranks, order: tuple[int, int]) -> None:
    assert ranks.elsewhere.must_wait(ranks.load)
    ranks.theirs.unseal(SLOTS)
    for job_id in order:
        assert ranks.elsewhere.over() == []
        fill(ranks.theirs, job_id, SLOTS[job_id == FILLS])
    assert ranks.elsewhere.over() == [9]
    assert ranks.mine.num_current(SLOTS, FILLS) == 4
    assert len(ranks.elsewhere) == 0


def test_a_load_does_not_wait_for_what_has_failed_there(ranks: Ranks) -> None:
    ranks.theirs.unseal(SLOTS)
    fill(ranks.theirs, 1, SLOTS[:2])
    fill(ranks.theirs, 2, SLOTS[2:3])
    ranks.theirs.fail(2, SLOTS[2:])
    assert ranks.elsewhere.over() == [9]
    assert ranks.mine.num_current(SLOTS, FILLS) == 3
    assert ranks.mine.has_failed(2, 7)
    assert not ranks.mine.has_failed(2, 6) and not ranks.mine.has_failed(1, 7)


@pytest.mark.parametrize("failed", [False, True])
def test_a_load_does_not_wait_where_a_later_job_has_come(ranks: Ranks, failed: bool) -> None:
    ranks.theirs.unseal(SLOTS)
    if failed:
        ranks.theirs.fail(5, SLOTS)
    else:
        fill(ranks.theirs, 5, SLOTS)
    assert ranks.elsewhere.over() == [9]
    assert ranks.mine.num_current(SLOTS, FILLS) == 0


def test_a_mark_of_an_earlier_failure_says_nothing(ranks: Ranks) -> None:
    ranks.theirs.unseal(SLOTS)
    ranks.theirs.fail(0, SLOTS)
    assert ranks.elsewhere.over() == []


def test_a_look_takes_one_slot_as_long_as_that_is_coming(
    ranks: Ranks, monkeypatch: pytest.MonkeyPatch
) -> None:
    looked_at: list[int] = []
    coming = Seals.coming

    def counted(seals: Seals, slots: Ids, fills: Ids) -> Any:
        looked_at.append(len(slots))
        return coming(seals, slots, fills)

    monkeypatch.setattr(Seals, "coming", counted)
    for _ in range(3):
        assert ranks.elsewhere.over() == []
    assert looked_at == [1, 1, 1]
    fill(ranks.theirs, 1, SLOTS[:2])
    for _ in range(3):
        assert ranks.elsewhere.over() == []
    assert looked_at[3:] == [1, 4, 1, 1]


def test_nobody_waits_for_jobs_that_are_long_over(ranks: Ranks) -> None:
    """Or that no other rank has a part of: their slots were taken by others."""
    ranks.elsewhere.began(3, 100.0 + SECONDS)
    assert ranks.elsewhere.over() == []
    ranks.elsewhere.began(4, 100.1 + SECONDS)
    assert ranks.elsewhere.over() == [9]


def test_nobody_waits_for_jobs_of_which_others_have_no_part(ranks: Ranks) -> None:
    """Of job 2 nobody else fills anything."""
    elsewhere = Elsewhere(ranks.mine, SECONDS)
    elsewhere.began(1, 100.0)
    elsewhere.wait(9, ranks.load)
    assert elsewhere.over() == []
    fill(ranks.theirs, 1, SLOTS[:2])
    assert elsewhere.over() == [9]


def test_who_is_over_does_not_wait(ranks: Ranks) -> None:
    assert 9 in ranks.elsewhere
    ranks.elsewhere.leave(9)
    ranks.elsewhere.leave(9)
    assert 9 not in ranks.elsewhere
    assert ranks.elsewhere.over() == []
