"""For all tests."""

import ctypes
from importlib.util import find_spec

import hypothesis
import pytest

from tests.seeds import OTHER_SEEDS, draw_the_same_beside_any_modules, use_other_seeds
from tests.strategies import thorough

# Also for property tests that do not say how long they draw.
hypothesis.settings.register_profile("fixed", thorough(100))
hypothesis.settings.load_profile("fixed")
draw_the_same_beside_any_modules()
if OTHER_SEEDS:
    use_other_seeds()

_M_MMAP_THRESHOLD = -3  # of glibc's <malloc.h>
_MAPPED_BYTES = 128 << 10


def give_memory_back() -> None:
    """Have glibc map each array of 128 KiB or more by itself, as it does until the first one is freed.

    Otherwise it keeps the memory of those that are freed: 14 GB in the course of all tests.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _MAPPED_BYTES)


give_memory_back()


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Hypothesis takes its seed from an option of its own."""
    if OTHER_SEEDS and config.option.hypothesis_seed is None:
        config.option.hypothesis_seed = OTHER_SEEDS


def pytest_report_header() -> list[str]:
    """Where vLLM is taken from; not imported, as most tests do without. The seeds, if they are others."""
    found = find_spec("vllm")
    vllm = f"vLLM: {found.origin if found else 'not installed'}"
    return [vllm, f"other seeds: KV_OFFLOAD_SEED={OTHER_SEEDS}"] if OTHER_SEEDS else [vllm]
