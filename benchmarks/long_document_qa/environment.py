"""What the processes of an engine read from their environment at start."""

from __future__ import annotations

import os

from benchmarks.long_document_qa.settings import Settings

__all__ = ["variables_of"]

_GIB = 2**30
# An engine stopped by force leaves shared memory to Python's resource tracker, which frees it with a warning.
_QUIET = "ignore:resource_tracker:UserWarning"


def variables_of(settings: Settings) -> dict[str, str]:
    """What to set there, alike for all modes. Cores given by the user stay.

    - Beside a connector, vLLM's CPU backend keeps one more core free, and on two cores it then keeps none
      free. Modes would run on different numbers of cores.
    - Each forward pass takes and returns tens of megabytes. Whether that goes through the kernel every time,
      for zeroed pages, is up to glibc's thresholds. They move with the largest block freed so far, and so
      differ between modes. Here they stand still, and nothing does.
    """
    defaults = {"VLLM_NO_USAGE_STATS": "1", "PYTHONWARNINGS": _QUIET}
    fixed = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"} if settings.in_process else {}
    if settings.device == "cpu":
        if "VLLM_CPU_OMP_THREADS_BIND" not in os.environ:
            defaults["VLLM_CPU_NUM_OF_RESERVED_CPU"] = "1"
        cache_gib = -(-settings.gpu_blocks * settings.block_bytes // _GIB) + 1
        fixed |= {
            "VLLM_CPU_KVCACHE_SPACE": str(cache_gib),
            "MALLOC_MMAP_THRESHOLD_": str(32 * 2**20),
            "MALLOC_TRIM_THRESHOLD_": str(_GIB),
        }
    return {name: os.environ.get(name, value) for name, value in defaults.items()} | fixed
