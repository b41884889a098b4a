"""For all tests."""

import vllm


def pytest_report_header() -> str:
    return f"vLLM {vllm.__version__}"
