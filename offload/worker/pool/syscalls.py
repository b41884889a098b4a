"""Linux calls that Python lacks, or makes while it holds the interpreter's lock. All raise OSError."""

import ctypes
import errno
import os
import platform

_MBIND = {"x86_64": 237, "aarch64": 235}
_MPOL_PREFERRED = 1
_LONG_BITS = 64

_libc = ctypes.CDLL(None, use_errno=True)


def madvise(address: int, nbytes: int, advice: int) -> None:
    """``mmap.madvise`` keeps the interpreter's lock; this one lets go of it, so that threads run together."""
    arguments = ctypes.c_void_p(address), ctypes.c_size_t(nbytes), ctypes.c_int(advice)
    _check(_libc.madvise(*arguments), "madvise")


def prefer_node(address: int, nbytes: int, node: int) -> None:
    """Have the kernel take pages not there yet from NUMA ``node``, and from others when it is full."""
    words = node // _LONG_BITS + 1
    mask = (ctypes.c_ulong * words)()
    mask[node // _LONG_BITS] = 1 << node % _LONG_BITS
    number = _MBIND.get(platform.machine())
    if number is None:
        raise OSError(errno.ENOSYS, f"mbind: its number is not known for {platform.machine()}")
    result = _libc.syscall(
        ctypes.c_long(number),
        ctypes.c_void_p(address),
        ctypes.c_ulong(nbytes),
        ctypes.c_int(_MPOL_PREFERRED),
        mask,
        ctypes.c_ulong(words * _LONG_BITS + 1),  # one more than there are bits: the kernel takes one off
        ctypes.c_uint(0),
    )
    _check(result, "mbind")


def _check(result: int, name: str) -> None:
    if result != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{name}: {os.strerror(code)}")
