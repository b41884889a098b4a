"""Two kernels that no library has: one that writes its target for long, one that breaks the device."""

from functools import cache
from typing import Any
from unittest import mock

import torch

_SOURCE = r"""
extern "C" __global__ void keep_writing(volatile unsigned char* target, int size, int cycles, int last)
{
    const int first = threadIdx.x + blockIdx.x * blockDim.x, step = blockDim.x * gridDim.x;
    const long long begin = clock64();
    unsigned char value = (unsigned char)threadIdx.x;
    do {
        for (int i = first; i < size; i += step)
            target[i] = value;
        ++value;
    } while (clock64() - begin < cycles);
    for (int i = first; i < size; i += step)
        target[i] = (unsigned char)last;
}

extern "C" __global__ void write_at(int address)
{
    *(volatile int*)(size_t)address = 1;
}
"""

_THREADS = 256
_LONGEST_CYCLES = 2**31 - 1


@cache
def _kernel(name: str) -> Any:
    # They include nothing, so that no CUDA toolkit is needed beside the one that torch brings.
    with mock.patch("torch.utils.cpp_extension.include_paths", return_value=[]):
        return torch.cuda._compile_kernel(_SOURCE, name)


def load_kernels() -> None:
    """Compile and load them. Loading may wait for the whole GPU, so it comes before anything is timed."""
    _kernel("keep_writing")
    _kernel("write_at")


def keep_writing(target: torch.Tensor, milliseconds: int, last: int) -> torch.cuda.Event:
    """Write other and other bytes into ``uint8`` ``target`` about that long, and ``last`` everywhere at last.

    One kernel on the current stream; the event is that of its end. Every byte is written by one thread,
    so that the last write is the one that stays.
    """
    cycles = min(milliseconds * clock_kilohertz(), _LONGEST_CYCLES)
    blocks = min(-(-target.numel() // _THREADS), 64)
    _kernel("keep_writing")((blocks, 1, 1), (_THREADS, 1, 1), [target, target.numel(), cycles, last])
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream())
    return event


def break_device() -> None:
    """Enqueue a write to an address that nothing has. The context is of no use from then on."""
    _kernel("write_at")(args=[16])


def clock_kilohertz() -> int:
    """The rate of the GPU's clock, about."""
    properties: Any = torch.cuda.get_device_properties(torch.cuda.current_device())
    return int(getattr(properties, "clock_rate", 0) or 2_000_000)
