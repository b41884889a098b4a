"""Asks CUDA, in a process of its own, whether memory can be pinned: ``python -m`` this module.

The process that reads the engine's configuration must not touch CUDA, because workers may be forked from it.
So a child puts the question, before any model is loaded. Not measured: needs a GPU.
"""

import subprocess
import sys

from offload.errors import HostMemoryError
from offload.worker.copiers.cuda import register_host_memory, unregister_host_memory
from offload.worker.pool.memory import HostMemory

_PROBE_BYTES = 64 << 20
_REFUSED = 3
_SECONDS = 60


def check_pinning() -> None:
    """Refuse to start where CUDA may not pin memory at all.

    Only a clear no counts. Whether the whole pool can be pinned shows when it is.

    Raises:
        HostMemoryError: CUDA refused to pin 64 MiB.
    """
    command = [sys.executable, "-m", "offload.worker.pool.pin_probe"]
    try:
        child = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return
    if child.returncode == _REFUSED:
        raise HostMemoryError(child.stderr.strip().splitlines()[-1])


def main() -> int:
    """Pin and unpin a little memory; 3 if that was refused."""
    try:
        memory = HostMemory(1, _PROBE_BYTES, register=register_host_memory, unregister=unregister_host_memory)
    except HostMemoryError as error:
        print(error, file=sys.stderr)
        return _REFUSED
    memory.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
