"""docs/models.md says of each row whether it is served or refused, and names tests that exist."""

import re
from fnmatch import fnmatch
from pathlib import Path

import pytest

from tests.test_traps_doc import names_in

TEXT = (Path(__file__).resolve().parent.parent / "docs" / "models.md").read_text()
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in TEXT.splitlines()
    if line.startswith("|") and not line.startswith("| ---")
]
ROWS = [row for row in ROWS if row[-1] != "tests"]
NAMED = sorted(set(re.findall(r"`([\w/]+\.py)::([\w:*]+)`", TEXT)))


def test_there_are_rows() -> None:
    assert len(ROWS) > 30 and all(len(row) == 3 for row in ROWS)


@pytest.mark.parametrize(("kind", "verdict", "tests"), ROWS, ids=[row[0][:40] for row in ROWS])
def test_a_row_says_what_becomes_of_it_and_who_shows_it(kind: str, verdict: str, tests: str) -> None:
    """A refusal comes with its remedy, or is the alternative to what is served."""
    assert re.match(r"served\b|refused: \w", verdict), f"{kind}: {verdict}"
    assert ".py::" in tests, kind


@pytest.mark.parametrize(("file", "name"), NAMED)
def test_what_it_names_exists(file: str, name: str) -> None:
    assert any(fnmatch(test, name) for test in names_in(file))
