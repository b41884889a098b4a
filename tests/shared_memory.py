"""What lies in /dev/shm."""

from pathlib import Path


def files_of_ours() -> set[Path]:
    """Files there that this project has named; others on this machine may have some."""
    return {path for path in Path("/dev/shm").iterdir() if "kv-offload" in path.name}
