"""Tables of rows: a column says what it is called, what it shows of a row, and how."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from offload.sizing.tables import format_table

__all__ = ["Column", "grouped", "table"]


class Column(NamedTuple):
    """A column.

    Attributes:
        head: its name.
        value: a key of the row, or a function of it; what is None, or has no such key, prints as `-`.
        style: how to print it, as in an f-string.
    """

    head: str
    value: str | Callable[[Any], object]
    style: str = ""

    def cell(self, row: Any) -> object:
        """What it shows of a row."""
        value = row.get(self.value) if isinstance(self.value, str) else self.value(row)
        return value if value is None else f"{value:{self.style}}"


def table(columns: Sequence[Column], rows: Iterable[Any]) -> str:
    """An aligned text table with a line per row; a row is whatever the columns take."""
    return format_table(
        [column.head for column in columns], [[column.cell(row) for column in columns] for row in rows]
    )


def grouped(rows: Iterable[dict[str, Any]], *keys: str) -> dict[tuple[Any, ...], list[dict[str, Any]]]:
    """Rows that are alike in these keys, in order of the first of each kind."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(tuple(row[key] for key in keys), []).append(row)
    return groups
