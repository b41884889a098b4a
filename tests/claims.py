"""Reads docs/claims.md: which figure of README and docs is held by which JSON of benchmarks/results.

A section is one benchmark run: its files, its command, maybe Python that reads the rows, and a table of
claims. A claim names a page, a figure and the expression that computes it. The figure is text of the page
with numbers in brackets, or a column of a table as ``first heading -> column``; ``*`` is every other one.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from statistics import mean, median, quantiles
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
CLAIMS = ROOT / "docs" / "claims.md"
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text()
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    if path != CLAIMS
}

NUMBER = re.compile(r"(?<![\w.])-?\d+(?:,\d{3})*(?:\.\d+)?")
MEASURED = re.compile(
    r"(?<![\w.])(-?\d[\d,]*(?:\.\d+)?)"
    r"(?=\s?%|x\b|\s(?:ms|us|s|seconds?|minutes?|times|percentage points|GB/s|bytes per block)(?!\w))"
)
"""A number in prose that counts as measured: one with such a unit behind it."""
NAMES = {"min": min, "max": max, "sum": sum, "len": len, "sorted": sorted, "abs": abs, "zip": zip}


class Table(NamedTuple):
    header: list[str]
    rows: list[dict[str, str]]

    @property
    def name(self) -> str:
        """The first heading with text."""
        return next(cell for cell in self.header if cell)


class Claim(NamedTuple):
    section: str
    page: str
    figure: str
    expression: str

    @property
    def is_column(self) -> bool:
        return " -> " in self.figure


class Section(NamedTuple):
    title: str
    text: str

    @property
    def files(self) -> list[str]:
        return re.findall(r"\]\(\.\./benchmarks/results/([\w.]+)\)", self.text)

    @property
    def commands(self) -> list[str]:
        return re.findall(r"`python -m (?:benchmarks|tests)\.(\w+)", self.text)

    @property
    def claims(self) -> list[Claim]:
        return [
            Claim(self.title, row["page"], row["figure"], row["expression"].strip("`"))
            for table in tables(self.text)
            if table.header == ["page", "figure", "expression"]
            for row in table.rows
        ]

    def names(self) -> dict[str, Any]:
        """What the section's expressions may use."""
        data = [json.loads((RESULTS / name).read_text()) for name in self.files]
        rows = [row for each in data for row in each.get("rows", ())]

        def having(**wanted: Any) -> list[dict[str, Any]]:
            """Rows with these values; a trailing underscore of a name is dropped."""
            return [row for row in rows if all(row[key.rstrip("_")] == wanted[key] for key in wanted)]

        def only(**wanted: Any) -> dict[str, Any]:
            [row] = having(**wanted)
            return row

        names = NAMES | {"data": data[0], "rows": rows, "having": having, "only": only}
        names |= {"median": median, "mean": mean, "quantiles": quantiles}
        for code in re.findall(r"^```python\n(.*?)^```", self.text, re.MULTILINE | re.DOTALL):
            exec(code, names)
        return names


def sections() -> list[Section]:
    """Of docs/claims.md, those with claims."""
    parts = re.split(r"^## ", CLAIMS.read_text(), flags=re.MULTILINE)[1:]
    return [Section(part.partition("\n")[0], part) for part in parts if Section("", part).claims]


def tables(text: str) -> list[Table]:
    """All tables; the first row of one is its heading. Backticks of cells in headings are left out."""
    found = []
    for block in re.findall(r"(?:^\|.*\n?)+", text, re.MULTILINE):
        header, _, *body = [
            [cell.strip() for cell in line.strip().strip("|").split("|")] for line in block.splitlines()
        ]
        header = [cell.replace("`", "") for cell in header]
        assert len(set(header)) == len(header), f"two columns have one heading: {header}"
        found.append(Table(header, [dict(zip(header, cells, strict=True)) for cells in body]))
    return found


def prose(text: str) -> str:
    """Paragraphs of a page, white space as single blanks: no tables, fences, headings, indented code."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    lines = ["" if re.match(r"\||#|    ", line) else line for line in text.splitlines()]
    return "\n".join(
        " ".join(part.split()) for part in re.split(r"\n\s*\n", "\n".join(lines)) if part.strip()
    )


def without_code_and_links(text: str) -> str:
    """The same length: code and the targets of links are blank."""
    return re.sub(r"`[^`]*`|\]\([^)]*\)", lambda match: " " * len(match[0]), text)


def figures_in(text: str) -> list[str]:
    return [match[0] for match in NUMBER.finditer(text)]


def agree(value: float, figure: str) -> bool:
    """Whether ``value`` rounds to the figure as it is written; where it is just between two, to either."""
    decimals = len(figure.partition(".")[2])
    return abs(value - float(figure.replace(",", ""))) <= (0.5 + 1e-9) * 10**-decimals


def brackets(figure: str) -> tuple[str, list[tuple[int, int]]]:
    """The text of a figure without its brackets, and where in it the bracketed numbers are."""
    text, spans = "", []
    for piece in re.split(r"(\[-?\d[\d,]*(?:\.\d+)?\])", figure):
        if re.fullmatch(r"\[-?[\d.,]+\]", piece):
            spans.append((len(text), len(text) + len(piece) - 2))
            piece = piece[1:-1]
        text += piece
    return text, spans


def as_cell(cell: str) -> Any:
    """A cell as an expression sees it: a whole number, or text without backticks."""
    plain = cell.replace("`", "")
    return int(plain.replace(",", "")) if re.fullmatch(r"\d[\d,]*", plain) else plain


def columns(claim: Claim) -> Iterator[tuple[Table, str]]:
    """The columns that a claim covers, on every table of its page that begins with that heading."""
    name, _, column = claim.figure.partition(" -> ")
    for table in tables(PAGES[claim.page]):
        if table.name == name.replace("`", ""):
            wanted = table.header[1:] if column == "*" else [column.replace("`", "")]
            yield from ((table, each) for each in wanted)


def compared(claim: Claim, names: dict[str, Any]) -> Iterator[tuple[str, list[str], list[float]]]:
    """Where, the figures as written, and the values as computed."""
    for where, written, context in _places(claim):
        value = eval(claim.expression, names | context)
        if value is None:
            yield where, written, []
        else:
            yield where, written, list(value) if isinstance(value, tuple | list) else [value]


def _places(claim: Claim) -> Iterator[tuple[str, list[str], dict[str, Any]]]:
    if not claim.is_column:
        text, spans = brackets(claim.figure)
        yield text, [text[start:end] for start, end in spans], {}
        return
    for table, column in columns(claim):
        for row in table.rows:
            this = {name: as_cell(cell) for name, cell in row.items()}
            context = {"this": this, "column": column}
            yield f"{table.name} -> {column}, {list(row.values())[:2]}", figures_in(row[column]), context
