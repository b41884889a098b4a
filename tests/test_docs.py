"""What README and docs promise by name is there: links, metrics, settings, keys of requests."""

import json
import pkgutil
import re
from dataclasses import MISSING, fields
from pathlib import Path

import pytest

from offload.config import OffloadConfig
from offload.fleet_config import FleetConfig
from offload.observe.metrics import METRICS
from offload.scheduler.hints import RequestHints
from offload.transfer_params import HAND_OFF_KEYS

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text()
USING = (ROOT / "docs" / "using.md").read_text()
TEXTS = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), ROOT / "tests" / "README.md"]
OUR_TEXTS = [path for path in TEXTS if path.name not in ("CHANGELOG.md", "comparison.md")]
"""Those that name no files of others, or that are gone."""
PACKAGES = ("allocator", "evictor", "offload", "tests")
FILES = {path.name for package in PACKAGES for path in (ROOT / package).rglob("*.py")}
DOTTED = r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+"
NOT_OURS = {
    *("request.block_hashes", "lora_request.load_inplace", "llm.llm_engine.step", "vllm.general_plugins"),
    *("BlockPool.touch", "CachePolicy.insert", "CachePolicy.on_request_access"),
    *("EngineArgs.create_engine_config", "resources.limits.memory", "mmap.madvise"),
    *("kv.retain", "kv.pin", "kv.demote", "kv.fetch", "kv.prefetch"),
    *("memory.max", "memory.high", "memory.limit_in_bytes"),
}
"""Names that vLLM, Linux or Kubernetes gives."""
COUNTERS = {f"{spec.name}_total" for spec in METRICS if spec.is_counter}
GAUGES = {spec.name for spec in METRICS if not spec.is_counter}


LONG_SENTENCE = 30
"""Words. CONTRIBUTING asks for 25; a few sentences that list names or values are longer."""


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
    assert "](docs/operations.md#" in README and "](#" in USING


def dotted_names(text: str) -> set[str]:
    """Between backquotes, and after `python -m`: modules and what is in them, and Python files."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    names = re.findall(rf"`({DOTTED})(?:\(\))?`|python -m ({DOTTED})", text)
    return {name for pair in names for name in pair if name and not name.endswith((".md", ".json", ".jsonl"))}


def is_there(name: str) -> bool:
    """A Python file by that name, or something that can be imported."""
    if name.endswith(".py"):
        return name in FILES
    try:
        pkgutil.resolve_name(name)
    except (ImportError, AttributeError):
        return False
    return True


@pytest.mark.parametrize("path", OUR_TEXTS, ids=[str(path.relative_to(ROOT)) for path in OUR_TEXTS])
def test_names_with_dots_are_there(path: Path) -> None:
    assert {name for name in dotted_names(path.read_text()) - NOT_OURS if not is_there(name)} == set()


def test_names_that_are_gone_are_seen() -> None:
    text = "`a.py`, `json.loads()`, `python -m benchmarks.none`\n`offload.errors.None_`, `policy.py`, `8.5`"
    names = dotted_names(text)
    assert names == {"a.py", "json.loads", "benchmarks.none", "offload.errors.None_", "policy.py"}
    assert {name for name in names if is_there(name)} == {"json.loads", "policy.py"}
    assert {name for path in OUR_TEXTS for name in dotted_names(path.read_text())} >= NOT_OURS


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
    """First cells of the table with that heading in docs/using.md."""
    table = USING.partition(f"| {heading} |")[2].partition("\n\n")[0].splitlines()[2:]
    return [line.split("|")[1].strip() for line in table]


def test_using_has_every_metric() -> None:
    named = {
        name
        for cell in first_cells("metric (`vllm:cpu_offload_...`)")
        for name in re.findall(r"`(\w+)`", cell)
    }
    unstored = {name for name in COUNTERS if name.startswith("unstored_blocks_")}
    assert named == COUNTERS - unstored | GAUGES
    [row] = re.findall(r"^\| `unstored_blocks_\.\.\._total` \|.*", USING, re.MULTILINE)
    reasons = {name.removeprefix("unstored_blocks_").removesuffix("_total") for name in unstored}
    assert set(re.findall(r"`(\w+)`", row)) == reasons


@pytest.mark.parametrize("path", TEXTS, ids=[str(path.relative_to(ROOT)) for path in TEXTS])
def test_metrics_named_in_full_are_there(path: Path) -> None:
    if path.name != "CHANGELOG.md":  # which also names those that are gone
        assert set(re.findall(r"vllm:cpu_offload_(\w+)", path.read_text())) <= COUNTERS | GAUGES


def test_every_setting_is_there_with_its_default() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \|", README + USING, re.MULTILINE)
    shown = dict(rows)
    keys = [field for field in fields(OffloadConfig) if field.name != "fleet"]
    for field in (*keys, *fields(FleetConfig)):
        default = "required" if field.default is MISSING else f"`{json.dumps(field.default)}`"
        assert shown[field.name] == ("none" if field.default is None else default), field.name


def test_using_has_every_key_of_a_request() -> None:
    keys = {
        field.name if field.name.startswith("max_") else f"cpu_offload_{field.name}"
        for field in fields(RequestHints)
    }
    assert {cell.strip("`") for cell in first_cells("key | value | meaning")} == keys


def test_using_has_every_key_of_a_hand_off() -> None:
    assert tuple(cell.strip("`") for cell in first_cells("key of a reference | meaning")) == HAND_OFF_KEYS


def prose(text: str) -> str:
    """Text without fences, tables, headings and indented code, which are not sentences."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    return "\n".join("" if re.match(r"\||#|    ", line) else line for line in text.splitlines())


def sentences(text: str) -> list[str]:
    """Of prose. Each item of a list begins a new one; code and links count as one word."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", re.sub(r"`[^`]*`", "code", prose(text)))
    parts = re.split(r"\n\s*\n|\n\s*(?:[-*]|\d+\.)\s", text)
    return [
        each for part in parts for each in re.split(r"(?<=[.!?])[)*\"]*\s+", " ".join(part.split())) if each
    ]


def test_sentences_are_short() -> None:
    texts = [README, *(path.read_text() for path in (ROOT / "docs").rglob("*.md"))]
    long = [each for text in texts for each in sentences(text) if len(each.split()) > LONG_SENTENCE]
    assert len(long) <= 10, "\n".join(long)


def test_long_sentences_are_seen() -> None:
    words = "word " * LONG_SENTENCE
    text = f"# {words}more\n\n| {words}more |\n\n    {words}more\n\nShort. {words}more. It ends.\n- {words}\n"
    assert [len(each.split()) for each in sentences(text)] == [1, LONG_SENTENCE + 1, 2, LONG_SENTENCE]


def test_the_readme_is_short() -> None:
    assert README.count("\n") <= 130
