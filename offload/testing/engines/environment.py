"""What engines are started with, beside their sizes."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    # So small a model gains nothing from a second thread, and on a busy machine they wait for each other.
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    # Ranks of log-probabilities are compiled at the first token, which takes seconds.
    "TORCHDYNAMO_DISABLE": "1",
}
"""Of engines with a tiny model on the CPU backend."""

ONE_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
ONE_PROCESS_FLAGS = {"--distributed-executor-backend": "uni"}
"""Of servers whose worker is in the process of their scheduler, as on one GPU.

On the CPU backend it is in one of its own otherwise, and each spins while it waits for the other.
"""


def transfer_config(
    extra_config: Mapping[str, Any], connector: str = "CpuOffloadConnector"
) -> dict[str, Any]:
    """vLLM's ``kv_transfer_config`` for a connector with that ``kv_connector_extra_config``."""
    return {
        "kv_connector": connector,
        "kv_role": "kv_both",
        "kv_connector_extra_config": dict(extra_config),
    }


@contextmanager
def environment_of(variables: Mapping[str, str]) -> Iterator[None]:
    """Inside, this process has these variables besides its own; children inherit them."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
