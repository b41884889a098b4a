"""The process that runs all tests does not keep the memory of what they have freed."""

import ctypes
import subprocess
import sys

import pytest

from tests.test_architecture import ROOT

# In a process of its own: where others have freed much, malloc has room below a page's begin, too.
PLACES = """
import mmap
import numpy as np
import tests.conftest

for megabytes in (30, 20):
    arrays = [np.ones(megabytes << 20, np.uint8) for _ in range(4)]
    print({array.ctypes.data % mmap.PAGESIZE for array in arrays})
    del arrays
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "gnu_get_libc_version"), reason="asks for glibc's malloc")
def test_an_array_is_mapped_by_itself_whatever_was_freed_before() -> None:
    """A mapping of glibc begins with two words of its own."""
    told = subprocess.run(
        [sys.executable, "-c", PLACES], cwd=ROOT, capture_output=True, text=True, check=True, timeout=120
    )
    assert told.stdout.split() == ["{16}", "{16}"]
