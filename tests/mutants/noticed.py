"""Which tests noticed the mutants of the list when somebody last looked. They are tried first.

They say nothing of whether a mutant is noticed today: where one of them does not fail, the others are tried.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from tests.mutants.edits import Edit

_FILE = Path(__file__).with_name("noticed.json")


def name_of(edit: Edit) -> str:
    """Unlike those of other mutants, wherever it is in the list."""
    return f"{edit.function}: {edit.old} -> {edit.new}"


def noticed(area: str) -> Mapping[str, Sequence[str]]:
    """Tests by the name of a mutant."""
    return _areas().get(area, {})


def remember(area: str, tests: Iterable[tuple[Edit, Sequence[str]]]) -> None:
    """Write down which tests noticed the mutants of an area, and no others. A line is a mutant."""
    areas = _areas() | {area: {name_of(edit): list(names) for edit, names in tests}}
    parts = []
    for name, mutants in sorted(areas.items()):
        lines = [f"  {json.dumps(mutant)}: {json.dumps(names)}" for mutant, names in sorted(mutants.items())]
        parts.append(f"{json.dumps(name)}: {{\n" + ",\n".join(lines) + "\n}")
    _FILE.write_text("{" + ",\n".join(parts) + "}\n")


def _areas() -> dict[str, dict[str, list[str]]]:
    areas: dict[str, dict[str, list[str]]] = json.loads(_FILE.read_text()) if _FILE.exists() else {}
    return areas
