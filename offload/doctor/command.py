"""``kv-offload doctor``: asks the engines that run, looks at their machine, and says what is wrong."""

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from offload.doctor.below import disks_full, hand_offs_wrong, peers_away, tiers_wrong
from offload.doctor.engine import (
    checksums_differ,
    jobs_failing,
    jobs_stuck,
    pool_too_small,
    routes_paused,
    settings_wrong,
    stores_dropped,
)
from offload.doctor.finding import Finding, Told, is_understood
from offload.doctor.machine import memory_wrong
from offload.errors import OperatorError
from offload.operator.client import choose, engines_in
from offload.operator.directory import SUFFIX, sockets_in
from offload.status_command import add_engine_options, directory_of
from offload.worker.pool.segment import machine

BY_ITS_WORD = (
    pool_too_small,
    routes_paused,
    jobs_stuck,
    jobs_failing,
    checksums_differ,
    stores_dropped,
    settings_wrong,
    tiers_wrong,
    peers_away,
    hand_offs_wrong,
)
ON_ITS_MACHINE = (disks_full, memory_wrong)
NONE, SOME, COULD_NOT_LOOK = 0, 1, 2
"""Exit statuses."""


class Examined(NamedTuple):
    """What came of looking.

    Attributes:
        engines: names of those that were looked at.
        findings: what is wrong.
        unseen: what could not be looked at, and why.
    """

    engines: list[str]
    findings: list[Finding]
    unseen: list[str]


def add_doctor_command(commands: Any) -> None:
    """Add the subcommand to those of a parser."""
    doctor: argparse.ArgumentParser = commands.add_parser(
        "doctor",
        help="what is wrong with the engines that run, and what to do",
        description="Asks the engines of this user that run, as kv-offload status does, and looks at their "
        "machine. Exit status: 0 nothing is wrong, 1 something is, 2 it could not look.",
    )
    add_engine_options(doctor)
    doctor.set_defaults(run=_doctor)


def examine(told: Told) -> Examined:
    """One engine, by what it says of itself and what its machine shows."""
    name = str(told["engine"])
    if not is_understood(told):
        return Examined([], [], [f"{name}: it runs another release; run the doctor of that one"])
    findings = [finding for check in BY_ITS_WORD for finding in check(told)]
    unseen = []
    try:
        here = machine()
    except OSError:
        here = None
    if told["pool"] is None:
        unseen.append(f"{name}: its pool is yet to be made; no step has begun")
    elif not told["memory"] or any(each["machine"] != here for each in told["memory"]):
        unseen.append(f"{name}: its ranks run elsewhere; run this on their machine, in their container")
    else:
        for check in ON_ITS_MACHINE:
            try:
                findings += check(told)
            except OSError as error:
                unseen.append(f"{name}: {error}; run this as the engine's user")
    return Examined([name], [finding._replace(engine=name) for finding in findings], unseen)


def examine_all(directory: Path, name: str | None) -> Examined:
    """All engines with a socket there, or the one that is so named.

    Raises:
        OperatorError: there is none, and nothing is left of any.
    """
    stale = [each for each in _stale(directory) if name is None or each.engine.startswith(name)]
    try:
        chosen = choose(directory, name)
    except OperatorError:
        if not stale:
            raise
        chosen = []
    found = [Examined([], stale, [])]
    for engine in chosen:
        try:
            found.append(examine(engine.ask("status")))
        except OperatorError as error:
            silent = Finding(
                "engine-silent",
                str(error),
                "its process is stopped or hangs whole: look at its log, and restart it",
                engine.name,
            )
            found.append(Examined([engine.name], [silent], []))
    engines, findings, unseen = ([x for each in found for x in each[part]] for part in range(3))
    return Examined(engines, findings, unseen)  # type: ignore[arg-type]


def _stale(directory: Path) -> Iterator[Finding]:
    alive = {engine.path for engine in engines_in(directory)}
    for path in sockets_in(directory):
        if path not in alive and path.exists():
            yield Finding(
                "stale-socket",
                f"nobody listens at {path}: it was killed, or vLLM stopped without --shutdown-timeout",
                "see in its log, and in dmesg, which; the next engine that starts removes the path",
                path.name.removesuffix(SUFFIX),
            )


def _doctor(options: argparse.Namespace) -> int:
    directory = directory_of(options)
    try:
        found = examine_all(directory, options.engine)
    except OperatorError as error:
        print(f"could not look: {error}", file=sys.stderr)
        return COULD_NOT_LOOK
    if options.json:
        told = {
            "directory": str(directory),
            "engines": found.engines,
            "findings": [finding._asdict() for finding in found.findings],
            "unseen": found.unseen,
        }
        print(json.dumps(told, indent=2))
    else:
        print("\n".join(_lines(found)))
    if not found.findings and not found.engines:
        return COULD_NOT_LOOK
    return SOME if found.findings else NONE


def _lines(found: Examined) -> Iterator[str]:
    for name in found.engines:
        count = sum(finding.engine == name for finding in found.findings)
        yield f"engine   {name}: {count or 'no'} finding{'' if count == 1 else 's'}"
    for finding in found.findings:
        yield f"finding  {finding.name} ({finding.engine})"
        yield f"  saw    {finding.saw}"
        yield f"  do     {finding.do}"
    for text in found.unseen:
        yield f"unseen   {text}"
