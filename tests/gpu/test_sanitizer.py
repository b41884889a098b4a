"""The kernel that copies small pieces under NVIDIA's compute-sanitizer, where that is installed.

memcheck checks every access of kernels against what is allocated. It does not look at the copy engine's
copies: for those the tests' cache has guards on both sides. racecheck is left out: it looks at the shared
memory of kernels, and this one has none; races between streams are the matter of test_races, which the tool
would serialize.
"""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.offload.places import needs_gpu
from tests.test_architecture import ROOT

_NAME = "compute-sanitizer"
_HOME = os.environ.get("CUDA_HOME") or "/usr/local/cuda"
SANITIZER = shutil.which(_NAME) or shutil.which(_NAME, path=str(Path(_HOME) / "bin"))
FOUND = 86

pytestmark = [
    pytest.mark.gpu,
    needs_gpu,
    pytest.mark.skipif(SANITIZER is None, reason=f"{_NAME} is not installed"),
    pytest.mark.timeout(900),
]

TESTS = ["tests/gpu/test_copy_paths.py", "-k", "brings_the_right_bytes"]
"""Every layout and path once. No test that needs the GPU to be fast: the tool slows it down."""


def memcheck(*command: str) -> subprocess.CompletedProcess[str]:
    assert SANITIZER is not None
    options = ["--tool", "memcheck", "--report-api-errors", "no", "--error-exitcode", str(FOUND)]
    # Each tensor gets memory of its own, or what lies beside it would be allocated too.
    environment = os.environ | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    return subprocess.run(
        [SANITIZER, *options, sys.executable, *command],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=850,
        check=False,
    )


def test_copies_touch_nothing_but_their_own() -> None:
    ran = memcheck("-m", "pytest", "-p", "no:cacheprovider", "-q", "-m", "gpu", *TESTS)
    assert ran.returncode == 0, ran.stdout
    assert " passed" in ran.stdout
    assert "ERROR SUMMARY: 0 errors" in ran.stdout


def test_a_stray_write_is_found() -> None:
    """So the test above is not blind."""
    ran = memcheck("-m", "tests.gpu.broken_device")
    assert ran.returncode == FOUND, ran.stdout
    assert "Invalid __global__ write" in ran.stdout
