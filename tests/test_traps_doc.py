"""docs/traps.md has every trap once, names tests that exist, and leaves out none named after a trap."""

import ast
import functools
import re
from fnmatch import fnmatch
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
TEXT = (TESTS.parent / "docs" / "traps.md").read_text()
NAMED = sorted(set(re.findall(r"`([\w/]+\.py)::([\w:*]+)`", TEXT)))


@functools.cache
def names_in(file: str) -> list[str]:
    """Test functions of a file, those of classes with the class in front."""
    body = ast.parse((TESTS / file).read_text()).body
    classes = [node for node in body if isinstance(node, ast.ClassDef)]
    inside = [(f"{node.name}::", inner) for node in classes for inner in node.body]
    functions = [*inside, *(("", node) for node in body)]
    return [prefix + node.name for prefix, node in functions if isinstance(node, ast.FunctionDef)]


def test_every_trap_has_one_row() -> None:
    numbers = re.findall(r"^\| (\d+) \|", TEXT, re.MULTILINE)
    assert len(numbers) >= 60 and [int(number) for number in numbers] == sorted({*map(int, numbers)})


def test_every_row_names_a_test_or_says_why_not() -> None:
    rows = [line for line in TEXT.splitlines() if re.match(r"\| \d", line)]
    assert all(".py::" in row or "cannot bite" in row for row in rows)


@pytest.mark.parametrize(("file", "name"), NAMED)
def test_what_it_names_exists(file: str, name: str) -> None:
    assert any(fnmatch(test, name) for test in names_in(file))


def test_no_test_of_a_trap_is_left_out() -> None:
    files = [str(path.relative_to(TESTS)) for path in TESTS.rglob("test_*.py")]
    tests = {(file, name) for file in files for name in names_in(file) if name.startswith("test_trap_")}
    named = {(file, test) for file, name in NAMED for test in names_in(file) if fnmatch(test, name)}
    assert tests and not tests - named
