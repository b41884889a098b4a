"""Importing ``offload`` refuses another package named ``allocator``; each import is a process of its own."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def imported(module: str, *path: Path, without_installed: bool = False) -> subprocess.CompletedProcess[str]:
    """``import module`` with only ``path`` before what is installed, or with nothing of ours installed."""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, path))}
    code = f"import {module}; print({module}.__file__)"
    if without_installed:
        kept = (
            "[each for each in sys.path if not os.path.exists(os.path.join(each, 'allocator', 'errors.py'))]"
        )
        code = f"import os, sys; sys.path[:] = {kept}; {code}"
    command = [sys.executable, "-P", "-c", code]
    return subprocess.run(command, env=environment, capture_output=True, text=True, cwd=path[0])


def foreign(folder: Path, name: str) -> Path:
    """A folder with another package of that name, which says so if it ever runs."""
    package = folder / name
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("print('the other one runs')\n\nclass Route: ...\n")
    return folder


def test_ours_are_found() -> None:
    done = imported("offload", ROOT)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()) == ROOT / "offload" / "__init__.py"


@pytest.mark.parametrize("name", ["allocator", "evictor"])
def test_a_foreign_package_earlier_on_the_path_is_refused(tmp_path: Path, name: str) -> None:
    done = imported("offload", foreign(tmp_path, name), ROOT)
    assert done.returncode == 1
    assert (
        f"the package '{name}' at {tmp_path / name / '__init__.py'} is not the one of kv-offload"
        in done.stderr
    )
    assert "install kv-offload again" in done.stderr
    assert "the other one runs" not in done.stdout


def test_a_foreign_package_later_on_the_path_is_nobody_s_concern(tmp_path: Path) -> None:
    assert imported("offload", ROOT, foreign(tmp_path, "allocator")).returncode == 0


def test_a_foreign_package_that_was_installed_over_ours_is_refused(tmp_path: Path) -> None:
    """As by ``pip install allocator`` after kv-offload: one folder, with files of both."""
    for name in ("evictor", "allocator", "offload"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "allocator" / "__init__.py").write_text("class Route: ...\n")
    done = imported("offload", tmp_path)
    assert done.returncode == 1
    assert "is not the one of kv-offload" in done.stderr


def test_a_folder_without_code_is_refused(tmp_path: Path) -> None:
    """Python takes it for a namespace package, if ours is not installed."""
    for name in ("evictor", "offload"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "allocator").mkdir()
    done = imported("offload", tmp_path, without_installed=True)
    assert done.returncode == 1
    assert "the package 'allocator'" in done.stderr
