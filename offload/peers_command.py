"""``kv-offload peers``: whom engines fetch from, who fetches from them, how much, how fast, and leases."""

import argparse
import json
import time
from typing import Any

from offload.operator.client import ask_each, choose
from offload.settings import GIB
from offload.status_command import add_engine_options, directory_of, tell_silent


def add_peers_command(commands: Any) -> None:
    """Add the subcommand to those of a parser."""
    peers: argparse.ArgumentParser = commands.add_parser(
        "peers",
        help="whom the engines that run fetch KV from, who fetches from them, how much, how fast, and leases",
        description="Asks the engines of this user that run, as kv-offload status does.",
    )
    add_engine_options(peers)
    peers.set_defaults(run=_peers)


def _peers(options: argparse.Namespace) -> int:
    directory = directory_of(options)
    told, silent = ask_each(choose(directory, options.engine), lambda each: each.ask("status"))
    found = [{key: each[key] for key in ("engine", "as_of", "peers", "askers", "leases")} for each in told]
    if options.json:
        print(json.dumps({"directory": str(directory), "engines": found, "silent": silent}, indent=2))
    for each in [] if options.json else found:
        print("\n".join(lines_of(each, time.time())))
    return tell_silent(silent)


def lines_of(told: dict[str, Any], now: float) -> list[str]:
    """For people. ``now``: seconds since 1970."""
    as_of, leases = told["as_of"], told["leases"]["num_leases"]
    when = "no step yet" if as_of is None else f"as of {max(0, round(now - as_of)):,} seconds ago"
    first = f"engine   {told['engine']}, {leases} leases of prompts for others; {when}"
    peers = [f"peer     {_line(each)}" for each in told["peers"]] or ["peer     none"]
    return [first, *peers, *[f"asker    {_asker(each)}" for each in told["askers"]]]


def _line(told: dict[str, Any]) -> str:
    who = f"{told['address']} ({told['peer'] or 'not known yet'})"
    if told["reason"]:
        return f"{who}: {told['state']}, {told['reason']}"
    speed = f" at {told['num_bytes'] / told['seconds'] / 1e9:.3g} GB/s" if told["seconds"] else ""
    return (
        f"{who}: {told['state']} by {told['transport'] or 'nothing'}, {told['num_bytes'] / GIB:.2f} GiB in "
        f"{told['num_fetches']:,} fetches{speed}; {told['num_questions']:,} questions, "
        f"{told['num_misses']:,} misses, {told['num_errors']:,} errors"
    )


def _asker(told: dict[str, Any]) -> str:
    who = f"{told['host']} ({told['peer'] or 'does not listen'})"
    how = "read" if told["is_near"] else "sent"
    speed = f" at {told['num_bytes'] / told['seconds'] / 1e9:.3g} GB/s" if told["seconds"] else ""
    return (
        f"{who}: {told['num_connections']} connections, {told['num_bytes'] / GIB:.2f} GiB {how}{speed}, "
        f"{told['num_questions']:,} questions"
    )
