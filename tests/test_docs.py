"""What README and docs promise by name is there: links, metrics, settings, keys of requests."""

import json
import re
from dataclasses import MISSING, fields
from pathlib import Path

import pytest

from offload.config import OffloadConfig
from offload.observe.metrics import METRICS
from offload.scheduler.hints import RequestHints

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
TEXTS = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "tests" / "README.md"]
COUNTERS = {f"{spec.name}_total" for spec in METRICS if spec.is_counter}
GAUGES = {spec.name for spec in METRICS if not spec.is_counter}


def anchors_of(text: str) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", TEXTS, ids=[str(path.relative_to(ROOT)) for path in TEXTS])
def test_links_lead_somewhere(path: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", path.read_text()):
        if "://" not in link:
            file, _, anchor = link.partition("#")
            target = path.parent / file if file else path
            assert target.exists(), link
            assert not anchor or anchor in anchors_of(target.read_text()), link


def test_there_are_links_to_look_at() -> None:
    assert "](docs/operations.md#" in README and "](#" in README


def test_decisions_are_numbered_one_after_the_other() -> None:
    names = sorted(path.name for path in (ROOT / "docs" / "decisions").iterdir())
    assert [int(name[:4]) for name in names] == list(range(1, len(names) + 1))


def test_benchmarks_are_listed() -> None:
    """Those that `make bench` runs, in the table of docs/benchmarks.md."""
    names = re.findall(r"^BENCHMARKS := ((?:.*\\\n)*.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    rows = re.findall(r"^\| .*\? \| (.+?) \|", (ROOT / "docs" / "benchmarks.md").read_text(), re.MULTILINE)
    listed = {name for row in rows for name in re.findall(r"`(\w+)`", row)}
    assert set(names[0].replace("\\", "").split()) == listed


def first_cells(heading: str) -> list[str]:
    """First cells of the README's table with that heading."""
    table = README.partition(f"| {heading} |")[2].partition("\n\n")[0].splitlines()[2:]
    return [line.split("|")[1].strip() for line in table]


def test_the_readme_has_every_metric() -> None:
    named = {
        name
        for cell in first_cells("metric (`vllm:cpu_offload_...`)")
        for name in re.findall(r"`(\w+)`", cell)
    }
    unstored = {name for name in COUNTERS if name.startswith("unstored_blocks_")}
    assert named == COUNTERS - unstored | GAUGES
    [row] = re.findall(r"^\| `unstored_blocks_\.\.\._total` \|.*", README, re.MULTILINE)
    reasons = {name.removeprefix("unstored_blocks_").removesuffix("_total") for name in unstored}
    assert set(re.findall(r"`(\w+)`", row)) == reasons


@pytest.mark.parametrize("path", TEXTS, ids=[str(path.relative_to(ROOT)) for path in TEXTS])
def test_metrics_named_in_full_are_there(path: Path) -> None:
    if path.name != "CHANGELOG.md":  # which also names those that are gone
        assert set(re.findall(r"vllm:cpu_offload_(\w+)", path.read_text())) <= COUNTERS | GAUGES


def test_the_readme_has_every_setting_with_its_default() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \|", README, re.MULTILINE)
    shown = dict(rows)
    for field in fields(OffloadConfig):
        default = "required" if field.default is MISSING else f"`{json.dumps(field.default)}`"
        assert shown[field.name] == ("none" if field.default is None else default), field.name


def test_the_readme_has_every_key_of_a_request() -> None:
    keys = {
        field.name if field.name.startswith("max_") else f"cpu_offload_{field.name}"
        for field in fields(RequestHints)
    }
    assert {cell.strip("`") for cell in first_cells("key | value | meaning")} == keys
