"""``kv-offload status``: how the engines that run stand, by their own word."""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from offload.operator.client import ask_each, choose
from offload.operator.directory import runtime_directory
from offload.settings import GIB


def add_status_command(commands: Any) -> None:
    """Add the subcommand to those of a parser."""
    status: argparse.ArgumentParser = commands.add_parser(
        "status",
        help="how the engines that run stand: pool, tiers, jobs, pauses",
        description="Asks the engines of this user that run. Each answers at its operator socket, also while "
        "it computes or hangs.",
    )
    add_engine_options(status)
    status.set_defaults(run=_status)


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """What all commands take that talk to an engine."""
    parser.add_argument("--engine", metavar="NAME", help="only that one; the beginning of its name will do")
    parser.add_argument(
        "--operator-socket",
        type=Path,
        metavar="DIRECTORY",
        help="what operator_socket is in the engine's configuration (default: the user's runtime directory)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def directory_of(options: argparse.Namespace) -> Path:
    """Where to look for engines."""
    given: Path | None = options.operator_socket
    return runtime_directory(None if given is None else str(given.absolute()))


def _status(options: argparse.Namespace) -> int:
    directory = directory_of(options)
    found, silent = ask_each(
        choose(directory, options.engine),
        lambda each: {**each.ask("status"), "weights": each.ask("weights")},
    )
    if options.json:
        print(json.dumps({"directory": str(directory), "engines": found, "silent": silent}, indent=2))
    for told in [] if options.json else found:
        print("\n".join(_lines(told)))
    return tell_silent(silent)


def tell_silent(silent: Sequence[str]) -> int:
    """Say why engines are left out; returns the exit status that this makes."""
    print(*silent, sep="\n", end="\n" if silent else "", file=sys.stderr)
    return int(bool(silent))


def _lines(told: dict[str, Any]) -> list[str]:
    about, pool, jobs = told["about"], told["pool"], told["jobs"]
    lines = [
        f"engine   {told['engine']}, up {_time(told['uptime_seconds'])}, model {about['model']}, vLLM "
        f"{about['vllm']}, kv-offload {about['kv_offload']}"
    ]
    if pool is None or jobs is None:
        return [*lines, "pool     is yet to be made: no step has begun"]
    used, size = pool["num_used_blocks"], pool["num_blocks"]
    lines += [
        f"pool     {used:,} of {size:,} blocks used ({used / size:.1%}), {pool['num_bytes'] / GIB:.2f} GiB, "
        f"{pool['num_tokens']:,} tokens; {pool['num_evicted_blocks']:,} blocks evicted, "
        f"{pool['num_adopted_blocks']:,} adopted; stored {'lazily' if pool['is_lazy'] else 'eagerly'}",
        f"jobs     {jobs['num_in_flight']} in flight, {jobs['num_stuck']} stuck, "
        f"{jobs['num_queued_blocks']} blocks wait to be stored",
    ]
    paused = [each["route"] for each in told["routes"] if each["is_paused"]]
    lines.append(f"paused   {', '.join(paused) if paused else 'no route'}")
    lines += [f"link     {_link(each)}" for each in told["routes"] if each["seconds_per_byte"]]
    lines += [
        f"prefill  {1 / each['seconds_per_token']:,.0f} tokens/s from token {each['from_tokens']:,} on"
        for each in told["prefill"]
        if each["seconds_per_token"]
    ]
    lines += [f"tier     {_tier(each)}" for each in told["tiers"] if "peers" not in each]
    if told["peers"]:
        num_connected = sum(each["state"] == "connected" for each in told["peers"])
        lines.append(f"peers    {num_connected} of {len(told['peers'])} connected; see kv-offload peers")
    if told["leases"]["num_leases"]:
        lines.append(f"leases   {told['leases']['num_leases']}, of prompts that were handed off")
    weights = told["weights"]
    if weights["num_resets"]:
        name = "without a name" if weights["version"] is None else f"named {weights['version']!r}"
        lines.append(f"weights  {name}, since reset {weights['num_resets']}")
    return [*lines, f"as of    {_time(told['age_seconds'])} ago"]


def _link(told: dict[str, Any]) -> str:
    speed, wait = 1e-9 / told["seconds_per_byte"], 1000 * told["seconds_per_job"]
    return f"{told['route']}: {speed:.3g} GB/s, and {wait:.2g} ms for each job"


def _tier(told: dict[str, Any]) -> str:
    text = f"{told.get('tier', 'tier')} at {told.get('path') or told.get('url')}"
    if "num_places" not in told:
        return text
    kept = told["num_extents"] * told["extent_bytes"] / GIB
    text += f": {told['num_extents']:,} of {told['num_places']:,} extents, {kept:.2f} GiB, namespace "
    text += f"{told.get('namespace')}, {told['budget_bytes'] / GIB:.2f} GiB may be written now"
    return text + ("; private since a reset" if told["is_private"] else "")


def _time(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
