"""docs/fleet.md is true: its example serves, its options have these defaults, its metrics are there."""

import argparse
import json
import re
import shlex
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from offload.config import OffloadConfig
from offload.proxy.command import POLICIES, add_proxy_command, load_policy, settings_of
from offload.proxy.metrics import ProxyMetrics
from offload.proxy.passing import PASSED
from tests.offload.proxy.kit import PROMPT, on_a_loop, stand

TEXT = (Path(__file__).resolve().parents[3] / "docs" / "fleet.md").read_text()
SERVE = r"CUDA_VISIBLE_DEVICES=\d vllm serve MODEL --port (\d+) --kv-transfer-config '([^']+)'"
"""A command of vLLM's: its port, and its setting."""


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> str:
    """The example as a module; its name."""
    [code] = re.findall(r"```python\n(.+?)```", TEXT, re.DOTALL)
    module = ModuleType("fleet_example")
    exec(compile(code, "fleet.md", "exec"), module.__dict__)
    monkeypatch.setitem(sys.modules, "fleet_example", module)
    return "fleet_example:SmallModelsApart"


def test_the_example_serves(example: str) -> None:
    policy = load_policy(example)

    @on_a_loop
    async def serve() -> None:
        async with stand(prefill=2, decode=2, policy=policy, min_prefill_tokens=1) as it:
            for _ in range(4):
                assert (await it.ask(prompt="short", max_tokens=1)).status == 200
            assert len(it.decode[0].of()) == 4 and not it.prefill[0].of() and not it.prefill[1].of()
            assert (await it.ask(prompt=PROMPT * 5, max_tokens=1)).status == 200
            assert len(it.prefill[0].of()) + len(it.prefill[1].of()) == 1
            assert not it.count("policy_fallbacks", reason="error")

    serve()


def parser() -> argparse.ArgumentParser:
    """That has the command, as ``kv-offload`` has it."""
    found = argparse.ArgumentParser()
    add_proxy_command(found.add_subparsers())
    return found


def options() -> dict[str, Any]:
    """Those of the command, with their defaults."""
    [commands] = [each for each in parser()._actions if isinstance(each, argparse._SubParsersAction)]
    actions = commands.choices["proxy"]._actions
    return {each.option_strings[-1]: each.default for each in actions if each.option_strings[-1] != "--help"}


def test_options_have_these_defaults() -> None:
    shown = {}
    table = TEXT.partition("\n## Options\n")[2].partition("\n## ")[0]
    for names, defaults in re.findall(r"^\| (`--.+?) \| (.+?) \|", table, re.MULTILINE):
        values = [each.strip("`") for each in defaults.split(", ")]
        for number, name in enumerate(re.findall(r"`(--[\w-]+)`", names)):
            shown[name] = values[min(number, len(values) - 1)]
    assert shown == {name: in_words(value) for name, value in options().items()}


def in_words(value: Any) -> str:
    if value is None or value == []:
        return "none"
    if value is False:
        return "off"
    return f"{value:g}" if isinstance(value, float) else str(value)


def test_options_in_the_text_are_there() -> None:
    text = re.sub(rf"{SERVE}|`vllm-router [^`]*`", "", TEXT)
    assert set(re.findall(r"(?<![\w-])--[a-z][\w-]*", text)) <= set(options())


def test_three_commands_fit_each_other() -> None:
    """Those for one machine: their settings are taken, the proxy asks these ports, and peers listen there."""
    part = TEXT.partition("\n## Try it on one machine\n")[2].partition("\n## ")[0]
    engines = {}
    for port, flag in re.findall(SERVE, part):
        given = json.loads(flag)
        config = OffloadConfig.from_mapping(given["kv_connector_extra_config"])
        assert (given["kv_connector"], given["kv_role"]) == ("CpuOffloadConnector", "kv_both")
        engines[str(config.fleet.role)] = (f"http://127.0.0.1:{port}", config.fleet)
    assert engines.keys() == {"prefill", "decode"}
    assert engines["decode"][1].peers == (engines["prefill"][1].listen,)
    [line] = re.findall(r"^    kv-offload (proxy .+)$", part, re.MULTILINE)
    settings = settings_of(parser().parse_args(shlex.split(line)))
    assert settings.engines == tuple((url, role) for role, (url, _) in engines.items())
    assert "`--min-prefill-tokens`" in part and f"more than {settings.min_prefill_tokens} tokens" in part


def test_policies_and_paths_are_named() -> None:
    table = TEXT.partition("\n## Policies\n")[2].partition("\n\n#")[0]
    assert set(re.findall(r"^\| `(\w+)`", table, re.MULTILINE)) == set(POLICIES)
    paths = TEXT.partition("\n## Other paths\n")[2]
    assert all(f"`{each}*`" in paths or f"`{each}`" in paths for each in PASSED)


def test_metrics_are_there() -> None:
    table = TEXT.partition("\n## What it counts\n")[2]
    rows = re.findall(r"^\| (`.+?) \|", table, re.MULTILINE)
    named = {name.removesuffix("_total") for row in rows for name in re.findall(r"`(\w+)`", row)}
    there = {each.name.removeprefix("kv_offload_proxy_") for each in ProxyMetrics().registry.collect()}
    assert named == there
