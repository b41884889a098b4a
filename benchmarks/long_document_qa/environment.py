"""What the processes of an engine read from their environment at start."""

from __future__ import annotations

import os

from benchmarks.long_document_qa.settings import Settings

__all__ = ["set_environment"]

_GIB = 2**30


def set_environment(settings: Settings) -> None:
    """Set what the engine's processes read at start, alike for all modes. Cores given by the user stay.

    - Beside a connector, vLLM's CPU backend keeps one more core free, and on two cores it then keeps none
      free. Modes would run on different numbers of cores.
    - Each forward pass takes and returns tens of megabytes. Whether that goes through the kernel every time,
      for zeroed pages, is up to glibc's thresholds. They move with the largest block freed so far, and so
      differ between modes. Here they stand still, and nothing does.
    """
    os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
    if settings.in_process:
        os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    if settings.device != "cpu":
        return
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(-(-settings.gpu_blocks * settings.block_bytes // _GIB) + 1)
    if "VLLM_CPU_OMP_THREADS_BIND" not in os.environ:
        os.environ.setdefault("VLLM_CPU_NUM_OF_RESERVED_CPU", "1")
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(32 * 2**20)
    os.environ["MALLOC_TRIM_THRESHOLD_"] = str(_GIB)
