"""The process that runs all tests does not keep the memory of what they have freed."""

import ctypes
import mmap

import numpy as np
import pytest


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "gnu_get_libc_version"), reason="asks for glibc's malloc")
def test_an_array_is_mapped_by_itself_whatever_was_freed_before() -> None:
    """A mapping of glibc begins with two words of its own."""
    for megabytes in (30, 1):
        arrays = [np.ones(megabytes << 20, np.uint8) for _ in range(4)]
        assert {array.ctypes.data % mmap.PAGESIZE for array in arrays} == {16}
        del arrays
