"""A slab is killed a few times, each time in another place; and what must be found is found."""

from collections import Counter
from pathlib import Path
from unittest import mock

import pytest

from offload.worker.media import slab
from offload.worker.media.slab import SlabMedium
from tests import crash

pytestmark = pytest.mark.timeout(600)


def counted(kills: int, seed: int, folder: Path) -> Counter[str]:
    *_, (_, counts) = crash.lives(kills, seed, folder)
    return counts


def test_a_killed_slab_serves_nothing_wrong_and_loses_nothing(tmp_path: Path) -> None:
    counts = counted(16, 3, tmp_path)
    assert (counts["wrong"], counts["lost"]) == (0, 0)
    assert counts["served"] > 50, counts


def test_a_slab_that_checks_nothing_serves_wrong_bytes(tmp_path: Path) -> None:
    with mock.patch.object(SlabMedium, "_check"):
        counts = counted(24, 3, tmp_path)
    assert counts["wrong"], counts


def test_a_slab_that_reports_before_its_log_knows_loses_extents(tmp_path: Path) -> None:
    class Forgetful(slab.SealLog):
        def add(self, place: int, generation: int, seals: slab.Checksums, label: slab.Label) -> None:
            if place % 3:
                super().add(place, generation, seals, label)

    with mock.patch.object(slab, "SealLog", Forgetful):
        counts = counted(8, 3, tmp_path)
    assert counts["lost"], counts
    assert not counts["wrong"]
