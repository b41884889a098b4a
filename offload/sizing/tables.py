"""Aligned text tables."""

from collections.abc import Sequence


def format_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Return a text table: a header, a rule, then `rows`; numbers to the right, text to the left.

    None prints as `-`; floats should come as text of the wanted precision.
    """
    cells = [["-" if value is None else str(value) for value in row] for row in rows]
    widths = [max(len(line[i]) for line in [list(columns), *cells]) for i in range(len(columns))]
    left = [all(_is_text(row[i]) for row in cells) for i in range(len(columns))]

    def line(values: Sequence[str]) -> str:
        padded = (
            v.ljust(w) if is_left else v.rjust(w) for v, w, is_left in zip(values, widths, left, strict=True)
        )
        return "  ".join(padded).rstrip()

    rule = "  ".join("-" * width for width in widths)
    return "\n".join([line(list(columns)), rule, *map(line, cells)])


def _is_text(cell: str) -> bool:
    return cell != "-" and not cell[:1].isdigit() and cell[:1] not in "+-."
