"""Ask the proxy for thousands of answers over engines that misbehave, and check each of them.

    python -m tests.proxy_soak [--requests 10000] [--seed 0] [--at-a-time 32] [--json FILE]

A model that is a pure function answers, so every token of every answer is known beforehand. One decode engine
always does what it should: each request ends whole there, or has gone on there, unless it cannot go on
(several choices, a seed, structured output). Such a stream may end with an error event, which is counted. All
other engines answer with statuses, nonsense, half a stream, never, or die. Clients may be slow or go away.

At the end nothing is left: no request, no task, no connection, no file descriptor. Everything follows from
the seed but for the order in which the network delivers. Exit status 1 if anything was wrong or stuck.
"""

import argparse
import asyncio
import json
import logging
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from tests.proxy_soak.run import soak


def main(arguments: Sequence[str] | None = None) -> int:
    """Run it; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.proxy_soak",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--at-a-time", type=int, default=32)
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args(arguments)
    logging.disable(logging.ERROR)
    began = time.monotonic()
    told = asyncio.run(soak(options.requests, options.seed, options.at_a_time))
    lines = {
        "requests": options.requests,
        "seed": options.seed,
        "at_a_time": options.at_a_time,
        "seconds": round(time.monotonic() - began),
        "outcomes": dict(sorted(told.outcomes.items())),
        "faults": dict(sorted(told.faults.items())),
        "left_behind": told.left_behind,
        "wrong": [f"request {number}: {why}" for number, why in told.wrong],
    }
    print(json.dumps(lines, indent=1))
    if options.json:
        from benchmarks.common import report

        options.json.parent.mkdir(parents=True, exist_ok=True)
        report.write_json(options.json, report.meta(), [lines])
    return int(bool(told.wrong or told.left_behind))


if __name__ == "__main__":
    sys.exit(main())
