"""Which vLLM this release works with. Imports no vLLM internals, so that it can say so anywhere."""

import logging
import re
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import NamedTuple

import vllm
from packaging.version import InvalidVersion, Version

from offload.errors import UnsupportedError
from offload.vllm.certification.certificate import (
    COMMAND,
    Certificate,
    certificate_path,
    differences,
    identity_here,
    read_certificate,
)

logger = logging.getLogger(__name__)

TESTED = ("0.31.0", "0.32.0", "0.33.0")
"""vLLM releases that this one is tested with, oldest first. Others from the oldest on need a certificate."""

_BUILD = re.compile(r"cpu|cu\d+")
"""Local parts of a version (``+cpu``, ``+cu129``) that name a build of the same source."""

_on_trial = ContextVar("_on_trial", default=False)


class Admission(NamedTuple):
    """Why this vLLM may start.

    Attributes:
        version: vLLM's.
        certificate: None if the release was tested.
        path: of the certificate.
    """

    version: str
    certificate: Certificate | None = None
    path: Path | None = None


@contextmanager
def on_trial() -> Iterator[None]:
    """Within, any release from the oldest tested one on may start: it is being certified."""
    token = _on_trial.set(True)
    try:
        yield
    finally:
        _on_trial.reset(token)


def is_on_trial() -> bool:
    """Whether this is within ``on_trial``."""
    return _on_trial.get()


def is_tested() -> bool:
    """Whether the vLLM at hand is one of ``TESTED``, in any build."""
    version = _read_version()
    return (version.local is None or _BUILD.fullmatch(version.local) is not None) and version.public in TESTED


def check_vllm_version() -> Admission:
    """Refuse a vLLM that was neither tested nor certified.

    Raises:
        UnsupportedError: it is older than all tested ones, or there is no certificate for it, or a stale one.
    """
    check_can_be_certified()
    version = str(vllm.__version__)
    if is_tested() or is_on_trial():
        return Admission(version)
    path = certificate_path()
    certificate = read_certificate(path)
    if certificate is None:
        raise UnsupportedError(
            f"vLLM {version} is not one that this release of kv-offload was tested with, and {path} has no "
            f"certificate for it; run `{COMMAND}`, which takes a minute, or install {_tested_ones()}"
        )
    wrong = differences(certificate, identity_here())
    if wrong:
        raise UnsupportedError(
            f"vLLM {version} is not one that this release of kv-offload was tested with, and the certificate "
            f"{path} is stale: {wrong}; run `{COMMAND}` again, or install {_tested_ones()}"
        )
    return Admission(version, certificate, path)


def warn_if_certified() -> None:
    """Say so in the log if this vLLM starts with a certificate alone.

    Raises:
        UnsupportedError: as ``check_vllm_version``.
    """
    version, certificate, path = check_vllm_version()
    if certificate is not None:
        logger.warning(
            "vLLM %s is not one that this release of kv-offload was tested with; it starts with the "
            "certificate %s of %s (seed %d, %d steps of virtual workers), for which no GPU kernel and no "
            "real model ran",
            version,
            path,
            certificate.date,
            certificate.seed,
            certificate.steps,
        )


def check_can_be_certified() -> None:
    """Refuse a vLLM that no certificate lets start.

    Raises:
        UnsupportedError: it is older than all tested ones, or its version cannot be read.
    """
    if _read_version() < Version(TESTED[0]):
        raise UnsupportedError(
            f"vLLM {vllm.__version__} is not supported by this release of kv-offload: it is older than "
            f"{TESTED[0]}, and no certificate changes that; install {_tested_ones()}"
        )


def _read_version() -> Version:
    try:
        return Version(vllm.__version__)
    except InvalidVersion:
        raise UnsupportedError(
            f"vLLM {vllm.__version__} is not supported by this release of kv-offload: that is no version to "
            f"compare with others; install {_tested_ones()}"
        ) from None


def _tested_ones() -> str:
    return f"{', '.join(TESTED[:-1])} or {TESTED[-1]}"
