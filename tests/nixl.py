"""NIXL for tests: where ``.ci/setup-nixl`` puts it."""

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

FOLDER = Path(sys.prefix) / "nixl"
"""No other part of the environment needs it."""


def need_nixl() -> None:
    """Let this process import it. Skips the test where it is not installed."""
    if not (FOLDER / "nixl").is_dir() and find_spec("nixl") is None:
        pytest.skip("NIXL is not installed (.ci/setup-nixl has no wheel for this machine)")
    if str(FOLDER) not in sys.path:
        sys.path.append(str(FOLDER))
