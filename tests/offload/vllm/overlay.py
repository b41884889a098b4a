"""A vLLM beside the one at hand: the same files but for a few, and another version."""

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import vllm

from offload.vllm.certification.certificate import Certificate, Identity
from tests.test_architecture import ROOT

NEWER = "0.34.0"

HERE = Path(vllm.__path__[0])

_SECONDS = 400


def lay_over(folder: Path, added: Mapping[str, str] | None = None, version: str = NEWER) -> Path:
    """Make ``folder/vllm`` of links into the vLLM at hand; ``folder`` is for PYTHONPATH.

    Args:
        folder: to put it into.
        added: source to add at the end of modules, by path below vllm.
        version: what it says it is.
    """
    _link_all(folder / "vllm", HERE)
    for name, source in (added or {}).items():
        copy = _own(folder, name)
        copy.write_text(f"{(HERE / name).read_text()}\n\n{source}\n")
    numbers = ", ".join(version.split("+")[0].split(".")[:3])
    _own(folder, "_version.py").write_text(
        f"__version__ = version = {version!r}\n__version_tuple__ = version_tuple = ({numbers})\n"
        "__commit_id__ = commit_id = None\n"
    )
    return folder


def run_with(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run Python with the vLLM in ``folder`` and these environment variables."""
    path = [str(folder), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path), **variables}
    return subprocess.run(
        [sys.executable, *arguments],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
        timeout=_SECONDS,
    )


def certificate_of(identity: Identity) -> Certificate:
    """One for that identity; nothing was run for it."""
    return Certificate(
        identity=identity,
        settings={},
        seed=1,
        seeds=8,
        steps=9,
        processor="some",
        date="2026-11-22T21:00:00+00:00",
    )


def _link_all(folder: Path, source: Path) -> None:
    folder.mkdir(parents=True)
    for entry in source.iterdir():
        if entry.name != "__pycache__":
            (folder / entry.name).symlink_to(entry)


def _own(folder: Path, name: str) -> Path:
    """The place of a file that is no link; folders above it become real ones."""
    parts = Path(name).parts
    here, there = folder / "vllm", HERE
    for part in parts[:-1]:
        here, there = here / part, there / part
        if here.is_symlink():
            here.unlink()
            _link_all(here, there)
    (here / parts[-1]).unlink()
    return here / parts[-1]
