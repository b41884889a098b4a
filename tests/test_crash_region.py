"""A process with a pool in shared memory is killed a few times; and what must be found is found."""

import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import pytest

from offload.messages import Kept
from offload.worker.pool.table import SlotTable
from tests import crash_region

pytestmark = pytest.mark.timeout(600)


@pytest.fixture
def root() -> Iterator[Path]:
    folder = Path(tempfile.mkdtemp(prefix="region-test-", dir="/dev/shm"))
    yield folder / "kv-offload-pool"
    shutil.rmtree(folder)


def counted(kills: int, root: Path) -> Counter[str]:
    *_, (_, counts) = crash_region.lives(kills, 3, root)
    return counts


def test_a_killed_pool_serves_nothing_wrong_and_loses_nothing(root: Path) -> None:
    counts = counted(20, root)
    assert (counts["wrong"], counts["lost"], counts["too_much_memory"]) == (0, 0, 0)
    assert counts["served"] > 100, counts


def test_rows_that_are_not_checked_say_what_is_wrong(root: Path) -> None:
    """A slot that is sealed and has the name of what it held before."""

    def kept(self: SlotTable) -> Kept:
        return self._rows(np.flatnonzero(self.seals.fills > 0))

    with mock.patch.object(SlotTable, "kept", kept), pytest.raises((AssertionError, RuntimeError)):
        assert not counted(40, root)["wrong"]


def test_a_worker_that_does_not_write_all_rows_loses_slots(root: Path) -> None:
    keep = SlotTable.keep

    def forgetful(self: SlotTable, kept: Kept) -> None:
        keep(self, kept.rows(kept.slots % 3 > 0))

    with mock.patch.object(SlotTable, "keep", forgetful):
        counts = counted(8, root)
    assert counts["lost"] and not counts["wrong"], counts
