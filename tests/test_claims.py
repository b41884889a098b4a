"""No figure outlives its run: docs/claims.md says which JSON holds it, and here they are compared."""

import re

import pytest

from tests.claims import (
    MEASURED,
    PAGES,
    RESULTS,
    ROOT,
    Claim,
    Section,
    agree,
    brackets,
    columns,
    compared,
    figures_in,
    prose,
    sections,
    tables,
    without_code_and_links,
)

SECTIONS = sections()
CLAIMS = [claim for section in SECTIONS for claim in section.claims]
TEXT = (ROOT / "docs" / "claims.md").read_text()


def exceptions(kind: str) -> list[dict[str, str]]:
    """Rows of the table of docs/claims.md that lists what is not measured."""
    [table] = [table for table in tables(TEXT) if table.header == ["page", kind, "what it is"]]
    return table.rows


@pytest.mark.parametrize("section", SECTIONS, ids=[section.title for section in SECTIONS])
def test_figures_are_those_of_the_run(section: Section) -> None:
    names, wrong = section.names(), []
    for claim in section.claims:
        for where, written, computed in compared(claim, names):
            if len(written) != len(computed) or not all(map(agree, computed, written)):
                wrong.append(f"{claim.page}: {where}: written {written}, computed {computed}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("section", SECTIONS, ids=[section.title for section in SECTIONS])
def test_sections_name_files_and_commands_that_exist(section: Section) -> None:
    assert section.files
    assert all((RESULTS / name).exists() for name in section.files)
    assert section.commands
    for name in section.commands:
        assert any(
            (ROOT / top / each).exists()
            for top in ("benchmarks", "tests")
            for each in (f"{name}.py", f"{name}/__main__.py")
        ), name


@pytest.mark.parametrize("claim", CLAIMS, ids=[f"{claim.page}: {claim.figure[:60]}" for claim in CLAIMS])
def test_claimed_figures_are_on_their_page(claim: Claim) -> None:
    if claim.is_column:
        covered = list(columns(claim))
        assert covered
        assert all(column in table.header for table, column in covered)
        assert any(figures_in(row[column]) for table, column in covered for row in table.rows)
    else:
        text, spans = brackets(claim.figure)
        assert spans, "no number in brackets"
        assert text in prose(PAGES[claim.page])


def test_every_file_of_results_is_claimed_or_named() -> None:
    """Nor is there a run that nothing quotes."""
    assert {path.name for path in RESULTS.glob("*.json")} == set(
        re.findall(r"\]\(\.\./benchmarks/results/([\w.]+)\)", TEXT)
    )


@pytest.mark.parametrize("page", PAGES)
def test_every_table_with_figures_is_claimed(page: str) -> None:
    """Each of its columns has a claim, is a key of one, or the table is listed as without measurements."""
    listed = {row["table"].replace("`", "") for row in exceptions("table") if row["page"] == page}
    claimed = {
        (table.name, column)
        for claim in CLAIMS
        if claim.page == page and claim.is_column
        for table, column in columns(claim)
    }
    keys = {
        (claim.figure.partition(" -> ")[0].replace("`", ""), key)
        for claim in CLAIMS
        if claim.page == page and claim.is_column
        for key in keys_of(claim)
    }
    missing = [
        f"{table.name} -> {column}"
        for table in tables(PAGES[page])
        for column in table.header
        if table.name not in listed
        and (table.name, column) not in claimed | keys
        and any(figures_in(row[column]) for row in table.rows)
    ]
    assert not missing


def keys_of(claim: Claim) -> set[str]:
    """Columns that the expression, or Python of its section, looks at to find the row."""
    [text] = [section.text for section in SECTIONS if section.title == claim.section]
    return {key.replace("`", "") for key in re.findall(r'this\["(.+?)"\]', text)}


@pytest.mark.parametrize("page", PAGES)
def test_every_measured_figure_in_prose_is_claimed(page: str) -> None:
    text = prose(PAGES[page])
    covered = [
        span
        for figure in [claim.figure for claim in CLAIMS if claim.page == page]
        for span in spans_in(text, figure)
    ]
    for row in exceptions("text"):
        if row["page"] == page:
            assert row["text"] in text, f"{row['text']} is not on {page} any more"
            covered += [match.span() for match in re.finditer(re.escape(row["text"]), text)]
    missing = [
        text[max(0, match.start() - 50) : match.end() + 30]
        for match in MEASURED.finditer(without_code_and_links(text))
        if not any(start <= match.start() and match.end() <= end for start, end in covered)
    ]
    assert not missing


def spans_in(text: str, figure: str) -> list[tuple[int, int]]:
    plain, spans = brackets(figure)
    starts = [match.start() for match in re.finditer(re.escape(plain), text)]
    return [(at + start, at + end) for at in starts for start, end in spans]


def test_exceptions_are_about_pages_and_tables_that_are_there() -> None:
    for row in exceptions("table"):
        assert row["table"].replace("`", "") in {table.name for table in tables(PAGES[row["page"]])}


def test_the_comparison_is_not_blind() -> None:
    """A wrong figure is seen, and so is one too many."""
    section = next(section for section in SECTIONS if "soak.json" in section.files)
    claim = Claim(
        section.title, "docs/correctness.md", "ran [1] steps over [2] seeds", '(data["steps"], 7, 8)'
    )
    [(_, written, computed)] = compared(claim, section.names())
    assert written == ["1", "2"]
    assert computed == [2130122, 7, 8]
    assert MEASURED.findall("took 1.5 ms, 20% and 3x, 4 times, 5 of 6 blocks") == ["1.5", "20", "3", "4"]


def test_values_agree_with_figures_that_round_to_them() -> None:
    assert agree(1234.4, "1,234")
    assert not agree(1234.6, "1,234")
    assert agree(0.975, "0.97") and agree(0.975, "0.98")  # just between two
    assert not agree(0.976, "0.97")
    assert agree(-9.4, "-9") and not agree(9.4, "-9")
