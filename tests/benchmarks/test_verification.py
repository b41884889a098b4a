"""The verification benchmark runs, in small, and writes what it prints."""

import pytest

from benchmarks.verification import __main__ as verification
from tests.benchmarks.conftest import Run

pytestmark = pytest.mark.timeout(120)


def test_a_small_run(run: Run) -> None:
    tiny = ["--blocks", "4", "--mib", "1", "--seconds", "0.01", "--bandwidths", "25"]
    rows, _, out, _ = run(verification, *tiny)
    checksums = [row for row in rows if row["kind"] == "checksum"]
    assert checksums
    assert all(row["gb_per_s"] > 0 for row in checksums)
    assert len(rows) > len(checksums)
    assert "share of restore time" in out
