"""``kv-offload certify``: shows that the vLLM at hand does what we rely on, and writes that down."""

import argparse
import math
import os
import random
import shlex
import sys
from pathlib import Path
from typing import Any

from offload.config import unwritable
from offload.errors import OffloadError, without_vllm

_SHOWN = """\
What this shows: vLLM's own scheduler ran with our whole connector on virtual workers, through random
requests, preemptions, aborts, resets and copies that fail. All that requests attend to was read back and
compared. vLLM itself planned and laid out the caches that were copied.
What it does not show: no GPU kernel and no other kernel of vLLM computed anything, no real model ran, and
no worker process or server of vLLM was started.
"""
_FAILED = """\
The certification failed, and no certificate was written: do not run kv-offload with this vLLM.
To report it, send all of this to the maintainers of your copy of kv-offload:
"""


def add_certify_command(commands: Any) -> None:
    """Add the subcommand to those of a parser."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "certify",
        help="try a vLLM that this release was not tested with, and write a certificate that lets it start",
        description="Runs the scheduler of the vLLM installed here with kv-offload on virtual workers, and "
        "copies blocks. If all goes well, writes a certificate with which this vLLM may start.",
    )
    parser.add_argument(
        "--seconds", type=_seconds, default=60.0, help="time for the virtual workers (default: %(default)g)"
    )
    parser.add_argument(
        "--seed", type=_seed, help="begin with the engine that it was printed for (default: a fresh one)"
    )
    parser.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="the certificate (default: the file that KV_OFFLOAD_CERTIFICATE names, or one in ~/.cache)",
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Carry out the command; return its exit status, 1 if the certification failed.

    Raises:
        OffloadError: there is no vLLM, or none that can be certified, or the certificate cannot be written.
    """
    try:
        from offload.vllm.certification.certificate import (
            certificate_path,
            withdraw_certificate,
            write_certificate,
        )
    except ModuleNotFoundError as missing:
        raise without_vllm(missing) from None
    from offload.vllm.certification.run import CertificationFailedError, certify
    from offload.vllm.versions import is_tested

    path = certificate_path() if options.output is None else _absolute(options.output)
    _check_target(path)
    seed = random.SystemRandom().randrange(10**9) if options.seed is None else options.seed
    try:
        certificate = certify(options.seconds, seed, _say)
    except CertificationFailedError as failure:
        print(f"{_FAILED}\n{failure}\n", file=sys.stderr)
        for place in {path, _usual_path() or path}:
            try:
                if withdraw_certificate(place, failure.identity):
                    print(f"The certificate of before is removed: {place}", file=sys.stderr)
            except OSError as error:
                print(f"Remove {place}, or the start accepts it: {error}", file=sys.stderr)
        return 1
    try:
        write_certificate(certificate, path)
    except OSError as error:
        raise _not_writable(path, error) from None
    _say(f"{'certificate':<12} {path}")
    if path != _usual_path():
        named = shlex.quote(str(path))
        print(f"The start looks elsewhere: set KV_OFFLOAD_CERTIFICATE={named} for the engine.")
    print(_SHOWN, end="")
    if is_tested():
        print(
            "This release of kv-offload was tested with this vLLM, which starts without a certificate, too."
        )
    return 0


def _usual_path() -> Path | None:
    """Where the start looks; None if there is no such place."""
    from offload.vllm.certification.certificate import certificate_path

    try:
        return certificate_path()
    except OffloadError:
        return None


def _absolute(path: Path) -> Path:
    """For a shell does not expand all there is: ``--output=~/x`` reaches us as it is."""
    return Path(os.path.expanduser(path)).absolute()


def _check_target(path: Path) -> None:
    """Before the minute that it takes."""
    try:
        target = Path(os.path.realpath(path))
        target.parent.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        raise _not_writable(path, error) from None
    reason = unwritable(target, beside=True)
    if reason is not None:
        raise _not_writable(path, reason)


def _not_writable(path: Path, reason: object) -> OffloadError:
    return OffloadError(
        f"the certificate cannot be written to {str(path)!r} ({reason}); name another file with --output"
    )


def _say(line: str) -> None:
    print(line, flush=True)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no time; give seconds, 0 or more, such as 60")
    return seconds


def _seed(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no seed; give a whole number, 0 or more")
    return int(text)
