"""``kv-offload reset``: tells engines which weights they have since their prefix caches were reset."""

import argparse
import json
import sys
from typing import Any

from offload.errors import OperatorError
from offload.operator.client import choose
from offload.status_command import add_engine_options, directory_of

_DESCRIPTION = """\
Names the weights that engines have since the last reset of their prefix caches. What they compute from then
on is kept below the pool under that name. What any engine has kept there under it is served again. Without a
name, what is computed after a reset is of use to nobody later. To be run after the reset and before the first
request: pause the engine, load the weights, POST /reset_prefix_cache?reset_external=true, run this, resume.
"""


def add_reset_command(commands: Any) -> None:
    """Add the subcommand to those of a parser."""
    reset: argparse.ArgumentParser = commands.add_parser(
        "reset",
        help="name the weights that engines have since their caches were reset",
        description=_DESCRIPTION,
    )
    reset.add_argument(
        "--weights-version", metavar="NAME", required=True, help="the same for the same weights"
    )
    reset.add_argument(
        "--after",
        type=int,
        metavar="N",
        help="refuse unless the last reset is number N, as status tells it (default: whichever it is)",
    )
    add_engine_options(reset)
    reset.set_defaults(run=_reset)


def _reset(options: argparse.Namespace) -> int:
    directory = directory_of(options)
    rows: list[dict[str, object]] = []
    for engine in choose(directory, options.engine):
        try:
            told = engine.ask("reset", weights_version=options.weights_version, after=options.after)
            rows.append({"engine": engine.name, **told, "error": None})
        except OperatorError as error:
            rows.append({"engine": engine.name, "error": str(error)})
    if options.json:
        print(json.dumps({"directory": str(directory), "engines": rows}, indent=2))
    for row in [] if options.json else rows:
        if row["error"] is not None:
            print(row["error"], file=sys.stderr)
        else:
            print(f"engine {row['engine']}: weights since reset {row['num_resets']} are {row['version']!r}")
    return int(any(row["error"] is not None for row in rows))
