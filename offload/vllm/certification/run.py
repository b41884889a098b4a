"""Certify the vLLM at hand: our virtual engine on its scheduler, and self-checks of what else we rely on.

What imports vLLM's internals is imported while it runs, since a name that is gone fails the certification.
"""

import datetime
import faulthandler
import logging
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import NamedTuple

from offload.errors import UnsupportedError
from offload.provenance import cpu_model
from offload.vllm.certification.border import border_modules
from offload.vllm.certification.certificate import COMMAND, Certificate, Identity, identity_here
from offload.vllm.versions import check_can_be_certified, on_trial

TURNS = 300
"""Turns of the random workload, per virtual engine."""

FEWEST_SEEDS = 8
"""Engines at least, whatever the time: one of so many has requests that leave chains being restored."""

HANG_SECONDS = 300.0
"""After which a virtual engine counts as hanging, and the process ends with a traceback. Most take one."""

_FAULTS = ("store ", "load ")
"""How the counts of copies that failed on purpose begin."""


class CertificationFailedError(Exception):
    """This vLLM does not do what this release relies on; the message is the report to send."""

    def __init__(self, identity: Identity, seed: int, cause: Exception) -> None:
        lines = [f"{name}: {value}" for name, value in identity._asdict().items()]
        lines += [f"command: {COMMAND} --seed {seed}", *traceback.format_exception(cause)]
        super().__init__("\n".join(lines).rstrip())
        self.identity = identity


class _Driven(NamedTuple):
    """What virtual engines went through."""

    seeds: int
    steps: int
    positions_checked: int
    restores: int
    faults: int


def certify(seconds: float, seed: int, say: Callable[[str], None]) -> Certificate:
    """Run all of it.

    Args:
        seconds: no virtual engine begins after that time; ``FEWEST_SEEDS`` run in any case.
        seed: of the first virtual engine.
        say: is told, line by line, what runs and what came of it.

    Raises:
        UnsupportedError: this vLLM is too old, or its source cannot be read; or Python runs with -O.
        CertificationFailedError: something did not hold.
    """
    if not __debug__:
        raise UnsupportedError(
            "python -O and PYTHONOPTIMIZE leave out what is to be checked; certify without them"
        )
    check_can_be_certified()
    identity = identity_here()
    modules = border_modules()
    for name, value in identity._asdict().items():
        say(f"{name:<12} {value}" + (f", over {len(modules)} modules of vLLM" if name == "digest" else ""))
    say(f"{'seed':<12} {seed}, to repeat this run with --seed {seed}")
    checks: list[str] = []
    with _quiet(), on_trial():
        with _reported(identity, seed):
            for check in _self_checks(seed):
                checks.append(check)
                say(check)
        driven = _drive(seconds, seed, identity)
    checks.append(
        f"scheduler: {driven.seeds} virtual engines, {driven.steps:,} steps, {driven.restores:,} restores, "
        f"{driven.faults:,} copies that failed on purpose; {driven.positions_checked:,} token positions read "
        f"back, all right"
    )
    say(checks[-1])
    return Certificate(
        identity=identity,
        settings={"seconds": seconds, "turns": TURNS},
        seed=seed,
        seeds=driven.seeds,
        steps=driven.steps,
        checks=checks,
        processor=cpu_model(),
        date=datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    )


def _self_checks(seed: int) -> Iterator[str]:
    from offload.testing.self_checks import self_checks

    return self_checks(seed)


def _drive(seconds: float, first: int, identity: Identity) -> _Driven:
    """Virtual engines, one after another, until the time is over."""
    with _reported(identity, first):
        from offload.testing.virtual import run_seed

    driven = _Driven(0, 0, 0, 0, 0)
    until = time.monotonic() + seconds
    for seed in count(first):
        if driven.seeds >= FEWEST_SEEDS and time.monotonic() >= until:
            return driven
        with _reported(identity, seed), _ended_if_it_hangs():
            ran = run_seed(seed, TURNS)
        faults = sum(number for name, number in ran.counts.items() if name.startswith(_FAULTS))
        driven = _Driven(
            driven.seeds + 1,
            driven.steps + ran.steps,
            driven.positions_checked + ran.positions_checked,
            driven.restores + ran.counts["loads"],
            driven.faults + faults,
        )
    raise AssertionError("seeds do not end")


@contextmanager
def _reported(identity: Identity, seed: int) -> Iterator[None]:
    """Any error within fails the certification; ``seed`` repeats it."""
    try:
        yield
    except Exception as error:
        raise CertificationFailedError(identity, seed, error) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Without log lines of vLLM's and ours: faults made on purpose are not worth one each."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)


@contextmanager
def _ended_if_it_hangs() -> Iterator[None]:
    """A loop without end in vLLM can be ended in no other way than with the process."""
    if sys.__stderr__ is not None:
        faulthandler.dump_traceback_later(HANG_SECONDS, exit=True, file=sys.__stderr__)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()
