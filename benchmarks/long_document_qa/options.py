"""The command line of the long-document benchmark."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common.arguments import one_of, parser_of
from benchmarks.long_document_qa.arguments import (
    ENGINE_NAMES,
    add_engine_arguments,
    add_prompt_arguments,
    check_memory,
    device_of,
    make_settings,
    make_workload,
)
from benchmarks.long_document_qa.settings import MODES, ORDERS, Settings, Workload

__all__ = ["Online", "Options", "parse"]

_OUT = Path(__file__).resolve().parent.parent / "out"
_ONLINE_NAMES = ("model", "label", "api_key")
_DEMO: dict[str, Any] = {"json": _OUT / "demo.json", "plot": _OUT / "demo.png"}
_QUICK_DEMO = {**_DEMO, "documents": [16, 8, 32], "modes": ("prefix", "offload"), "in_process": True}
_FULL_DEMO = {**_DEMO, "documents": [8, 16, 32], "modes": ("plain", "prefix", "offload")}


@dataclass(frozen=True)
class Online:
    """A server to measure: address, served model (None: its first), name for the rows, bearer token."""

    base_url: str
    model: str | None
    label: str
    api_key: str | None


@dataclass(frozen=True)
class Options:
    """A validated command line. `settings` (which repeat `workload`) are None online.

    `side_by_side`: engines of all modes are started first, and each document count is asked of all in turn.
    """

    workload: Workload
    settings: Settings | None
    modes: tuple[str, ...]
    online: Online | None
    json: Path | None
    plot: Path | None
    side_by_side: bool = False


def parse(arguments: Sequence[str] | None = None, doc: str | None = None) -> Options:
    """Parse the command line. Bad arguments end the process with status 2 and a message that names them."""
    parser = _parser(doc)
    given = {name: value for name, value in vars(parser.parse_args(arguments)).items() if value is not None}
    demo, full = given.pop("demo"), given.pop("full")
    try:
        _check_combination(given, demo, full)
        chosen = given
        if demo:
            quick = not full and device_of(given.get("device", "auto")) == "cpu"
            chosen = {**(_QUICK_DEMO if quick else _FULL_DEMO), **given}
        online = _online(chosen)
        if online:
            chosen.setdefault("seed", time.time_ns() % 2**32)  # a server may still hold an earlier run's
            settings, workload = None, make_workload(chosen)
        else:
            settings = make_settings(chosen)
            workload = settings.workload
            modes = chosen.get("modes", MODES)
            check_memory(settings, modes, len(modes) if settings.in_process else 1)
    except ValueError as error:
        parser.error(str(error))
    return Options(
        workload,
        settings,
        chosen.get("modes", MODES),
        online,
        chosen.get("json"),
        chosen.get("plot"),
        side_by_side=settings is not None and settings.in_process,
    )


def _parser(doc: str | None) -> argparse.ArgumentParser:
    parser = parser_of("long_document_qa", doc)
    add = parser.add_argument
    add("--demo", action="store_true", help="show the point in two minutes; writes benchmarks/out/")
    add(
        "--full", action="store_true", help="with --demo: as the benchmark itself measures, in twice the time"
    )
    add("--modes", type=one_of(MODES), metavar="MODE,...", help=f"of {','.join(MODES)} (default: all)")
    add("--plot", type=Path, metavar="FILE", help="write a plot (PNG)")

    group = parser.add_argument_group("workload")
    add = group.add_argument
    add("--documents", type=int, nargs="+", metavar="N", help="document counts (default: 8 16 32 64)")
    add("--passes", type=int, metavar="N", help="times each document is asked; 1 is no reuse (default: 2)")
    add("--order", choices=ORDERS, help="of asking (default: random)")
    add_prompt_arguments(group)
    add_engine_arguments(parser.add_argument_group("engine (offline)"))

    group = parser.add_argument_group("server (online)")
    add = group.add_argument
    add("--base-url", metavar="URL", help="measure this running server instead, e.g. http://localhost:8000")
    add("--model", metavar="NAME", help="served model (default: the server's first)")
    add("--label", metavar="NAME", help="name of the mode in rows and table (default: online)")
    add("--api-key", metavar="KEY", help="sent as bearer token")
    return parser


def _check_combination(given: dict[str, Any], demo: bool, full: bool) -> None:
    """Raise ValueError if options for an engine made here and for a running server are mixed."""
    if full and not demo:
        raise ValueError("--full: only with --demo")
    online = "base_url" in given
    wrong = [name for name in ((*ENGINE_NAMES, "modes") if online else _ONLINE_NAMES) if name in given]
    flags = ["--model-shape" if name == "shape" else "--" + name.replace("_", "-") for name in wrong]
    if online and demo:
        flags.append("--demo")
    if flags:
        raise ValueError(f"{', '.join(flags)}: {'not with' if online else 'only with'} --base-url")


def _online(chosen: dict[str, Any]) -> Online | None:
    url = chosen.get("base_url")
    if url is None:
        return None
    if not url.startswith(("http://", "https://")):
        raise ValueError(f"--base-url {url}: must start with http:// or https://")
    return Online(url, chosen.get("model"), chosen.get("label", "online"), chosen.get("api_key"))
