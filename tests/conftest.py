"""For all tests."""

from importlib.util import find_spec


def pytest_report_header() -> str:
    """Where vLLM is taken from; not imported, as most tests do without."""
    found = find_spec("vllm")
    return f"vLLM: {found.origin if found else 'not installed'}"
