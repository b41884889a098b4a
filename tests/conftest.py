"""For all tests."""

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
