"""``kv-offload resize``: how much memory the pools of engines that run are to have."""

import argparse
import json
import math
import sys
import time
from typing import Any

from offload.errors import ConfigError, OperatorError
from offload.operator.client import Engine, choose
from offload.status_command import add_engine_options, directory_of

_DESCRIPTION = """\
Makes the CPU pools of engines larger or smaller while they run. Nothing that is under way is touched. A pool
may have up to cpu_gib_max, which is cpu_gib if the configuration does not say more. It changes with the steps
of its engine: one that has no requests does it when the next one comes. Exit status: 1 if an engine cannot,
or if it was not done in the time of --wait.
"""
_POLL_SECONDS = 0.1


def add_resize_command(commands: Any) -> None:
    """Add the subcommand to those of a parser."""
    resize: argparse.ArgumentParser = commands.add_parser(
        "resize", help="make the pools of engines that run larger or smaller", description=_DESCRIPTION
    )
    resize.add_argument("gib", type=float, metavar="GIB", help="memory of each engine's pool")
    resize.add_argument(
        "--wait", type=float, default=0.0, metavar="SECONDS", help="until it is done, at most (default: 0)"
    )
    add_engine_options(resize)
    resize.set_defaults(run=_resize)


def _resize(options: argparse.Namespace) -> int:
    if not 0 <= options.wait < math.inf:
        raise ConfigError(f"--wait is {options.wait}; give a number of seconds from 0 on")
    if not 0 < options.gib < math.inf:
        raise ConfigError(f"GIB is {options.gib:g}; give the memory of each pool in GiB, such as 8")
    directory = directory_of(options)
    until = time.monotonic() + options.wait
    rows: list[dict[str, Any]] = []
    for engine in choose(directory, options.engine):
        try:
            told = engine.ask("resize", gib=options.gib)
            rows.append({"engine": engine.name, **_settled(engine, told, until)})
        except OperatorError as error:
            rows.append({"engine": engine.name, "error": str(error)})
    if options.json:
        print(json.dumps({"directory": str(directory), "engines": rows}, indent=2))
    for row in [] if options.json else rows:
        if row["error"]:
            print(row["error"], file=sys.stderr)
        elif row["gib"] == row["target_gib"]:
            print(f"engine {row['engine']}: the pool has {row['gib']:g} GiB")
        else:
            print(
                f"engine {row['engine']}: {row['gib']:g} GiB, on the way to {row['target_gib']:g}, in whole "
                f"blocks; it goes on with the steps of the engine, and an idle one has none"
            )
    is_late = options.wait and any(row["gib"] != row["target_gib"] for row in rows if not row["error"])
    return int(any(row["error"] for row in rows) or is_late)


def _settled(engine: Engine, told: dict[str, Any], until: float) -> dict[str, Any]:
    """How it stands when it is done, or has failed, or the time is over."""
    while told["gib"] != told["target_gib"] and not told["error"] and time.monotonic() < until:
        time.sleep(_POLL_SECONDS)
        told = engine.ask("size")
    return told
