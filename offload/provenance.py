"""What a result was made with, for its reader: this package's version, and the processor."""

import platform
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def own_version() -> str:
    """The version of this package, as it is installed."""
    try:
        return version("kv-offload")
    except PackageNotFoundError:  # run from a checkout
        return "not installed"


def cpu_model(cpuinfo: Path = Path("/proc/cpuinfo")) -> str:
    """The CPU's model as Linux names it, or else its architecture."""
    with suppress(OSError):
        for line in cpuinfo.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
