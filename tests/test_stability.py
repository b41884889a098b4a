"""docs/stability.md lists the public surface: neither a name too many nor one too few."""

import importlib
import json
import re
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest

from evictor import available_policies
from offload.cli import main
from offload.config import OffloadConfig
from offload.fleet_config import FLEET_KEYS
from offload.observe.metrics import METRICS
from offload.observe.recorder import TraceRecorder
from offload.scheduler.hints import RequestHints
from offload.transfer_params import HAND_OFF_KEYS

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "docs" / "stability.md").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def section(heading: str) -> str:
    """Text below a heading that begins so."""
    [part] = [part for part in re.split(r"^## ", TEXT, flags=re.MULTILINE) if part.startswith(heading)]
    return part


def lists(text: str) -> list[list[str]]:
    """Paragraphs that are nothing but names in backticks with commas between."""
    paragraphs = [" ".join(each.split()) for each in text.split("\n\n")]
    return [re.findall(r"`(.+?)`", each) for each in paragraphs if re.fullmatch(r"(`[^`]+`(, |$))+", each)]


def table(text: str) -> dict[str, str]:
    """First cells of its table and what is behind them."""
    rows = re.findall(r"^\| (.+?) \| (.+) \|$", text, re.MULTILINE)
    return dict(rows[1:])


def test_settings_and_policies() -> None:
    settings, fleet, policies = lists(section("Settings"))
    assert [*settings, "fleet"] == [field.name for field in fields(OffloadConfig)]
    assert fleet == list(FLEET_KEYS)
    assert policies == list(available_policies())


def test_keys_of_requests() -> None:
    keys, hand_offs = lists(section("What a request"))
    assert hand_offs == list(HAND_OFF_KEYS)
    assert keys == [
        field.name if field.name.startswith("max_") else f"cpu_offload_{field.name}"
        for field in fields(RequestHints)
    ]


def test_metrics() -> None:
    counters, gauges = lists(section("Metrics"))
    assert counters == [f"{spec.name}_total" for spec in METRICS if spec.is_counter]
    assert gauges == [spec.name for spec in METRICS if not spec.is_counter]


def test_entry_points() -> None:
    names = table(section("How vLLM finds it"))
    assert set(PROJECT["scripts"]) == {PROJECT["name"]} == {"kv-offload"}
    assert set(PROJECT["entry-points"]) == {"vllm.general_plugins"}
    [plugin] = PROJECT["entry-points"]["vllm.general_plugins"]
    places = [re.findall(r"`(.+?)`", name) for name in names]
    assert places[1:] == [["kv-offload"], ["CpuOffloadConnector"], [plugin], places[-1]]
    name, module = places[-1]
    assert hasattr(importlib.import_module(module), name)
    from offload.vllm import plugin as registered

    assert registered.CONNECTOR == "CpuOffloadConnector"
    assert plugin == registered.PLUGIN


def options(capsys: pytest.CaptureFixture[str], *command: str) -> tuple[set[str], set[str]]:
    """Long options and sub-commands that ``--help`` of a command shows."""
    with pytest.raises(SystemExit) as end:
        main([*command, "--help"])
    assert end.value.code == 0
    shown = capsys.readouterr().out
    commands = re.search(r"\{([\w,]+)\}\s+\.\.\.", shown)
    names = re.findall(r"^  (?:-\w, )?(--[\w-]+)", shown, re.MULTILINE)
    return set(names), set(commands[1].split(",")) if commands else set()


def test_commands_and_their_options(capsys: pytest.CaptureFixture[str]) -> None:
    listed = {
        name.strip("`"): set(re.findall(r"`(--[\w-]+)`", cell))
        for name, cell in table(section("The command")).items()
        if name.startswith("`kv-offload")
    }
    own, commands = options(capsys)
    found = {"kv-offload": own}
    for name in commands:
        shown, below = options(capsys, name)
        found |= {f"kv-offload {name} {each}": options(capsys, name, each)[0] for each in below}
        if not below:
            found[f"kv-offload {name}"] = shown
    assert len(commands) >= 4
    assert listed == found


def test_keys_of_a_trace(tmp_path: Path) -> None:
    recorder = TraceRecorder(tmp_path / "trace.jsonl", 512)
    recorder.record(0.0, 512, 1, [b"0" * 32], ending="stop")
    recorder.close()
    line = json.loads((tmp_path / "trace.jsonl").read_text())
    [cell] = [cell for name, cell in table(section("Files")).items() if name == "a recorded trace"]
    assert re.findall(r"`(\w+)`", cell) == list(line)


def test_parts_of_log_lines_are_in_the_source() -> None:
    source = "".join(path.read_text() for path in (ROOT / "offload").rglob("*.py"))
    parts = [name.strip("`") for name in table(section("Log lines")) if name.startswith("`")]
    assert len(parts) == 3
    assert all(part in source for part in parts)


@pytest.mark.parametrize("package", ["evictor", "allocator", "offload"])
def test_exported_names(package: str) -> None:
    [paragraph] = [part for part in section("Python").split("\n\n") if part.startswith(f"**`{package}`**")]
    assert re.findall(r"`(\w+)`", paragraph)[1:] == importlib.import_module(package).__all__


def test_no_other_package_exports_without_being_listed() -> None:
    """Packages below ``offload`` export for ourselves; the page says that modules are internal."""
    tops = {path.parent.name for path in ROOT.glob("*/__init__.py")} - {"tests", "benchmarks"}
    assert tops == {"evictor", "allocator", "offload"}
