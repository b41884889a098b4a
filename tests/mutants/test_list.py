"""Every mutant of the list is noticed by more than one of our tests, or by an invariant."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.mutants.mutants import MUTANTS
from tests.seeds import OTHER_SEEDS

ROOT = Path(__file__).parents[2]

pytestmark = [
    pytest.mark.skipif(OTHER_SEEDS != 0, reason="which test meets a mutant is up to the seeds"),
    pytest.mark.timeout(2400),  # the first waits for all of them
]


def test_there_are_as_many_as_the_documentation_says() -> None:
    number = sum(map(len, MUTANTS.values()))
    assert (
        f"{number} mutants of the allocator, policies, scheduler, ledger, amounts, hints, answers and seals"
        in (ROOT / "docs" / "correctness.md").read_text()
    )


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], str, int]:
    """Verdicts on all of them, what was said, and the exit status.

    In one process that is not this one: its tests draw less than ours, and it forks.
    """
    log = tmp_path_factory.mktemp("mutants") / "verdicts"
    judge = [sys.executable, "-m", "tests.mutants.judge", *MUTANTS, "--log", str(log)]
    ran = subprocess.run(judge, cwd=ROOT, capture_output=True, text=True, check=False)
    verdicts = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    return verdicts, ran.stdout + ran.stderr, ran.returncode


@pytest.mark.parametrize("area", MUTANTS)
def test_mutants_are_noticed(area: str, judged: tuple[list[dict[str, Any]], str, int]) -> None:
    verdicts = [verdict for verdict in judged[0] if verdict["area"] == area]
    assert len(verdicts) == len(MUTANTS[area]), judged[1]
    survivors = [verdict for verdict in verdicts if not verdict["is_seen"]]
    assert not survivors, "\n".join(map(str, survivors))


def test_no_test_fails_without_a_mutant(judged: tuple[list[dict[str, Any]], str, int]) -> None:
    """It would notice them all. The judge looks at that last, and says so by its exit status."""
    verdicts, said, status = judged
    assert status == any(not verdict["is_seen"] for verdict in verdicts), said
