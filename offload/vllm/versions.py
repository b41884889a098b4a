"""Which vLLM this release works with. Imports no vLLM internals, so that it can say so anywhere."""

import re

import vllm

from offload.errors import UnsupportedError

SUPPORTED = ((0, 31), (0, 32), (0, 33))
"""Supported vLLM releases as (major, minor), oldest first; every patch release of them."""


def check_vllm_version(version: str | None = None) -> str:
    """Refuse a vLLM this release was not tested with; return its version otherwise.

    Raises:
        UnsupportedError: the version is outside ``SUPPORTED``.
    """
    version = vllm.__version__ if version is None else version
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None or (int(match[1]), int(match[2])) not in SUPPORTED:
        wanted = ", ".join(f"{major}.{minor}.*" for major, minor in SUPPORTED)
        raise UnsupportedError(
            f"vLLM {version} is not supported by this release of kv-offload, which works with vLLM {wanted}; "
            f"install one of these, or a kv-offload that lists {version}"
        )
    return version
