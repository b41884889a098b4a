"""Imports, once, what every engine on a CPU imports; engines are forked from the process that did.

What is said meanwhile is not shown: whatever matters is said again by the engine that meets it, into
its own log.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def _unheard() -> Iterator[None]:
    kept = [os.dup(1), os.dup(2)]
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        for number in (1, 2):
            os.dup2(nowhere, number)
        yield
    finally:
        for number, copy in zip((1, 2), kept, strict=True):
            os.dup2(copy, number)
            os.close(copy)
        os.close(nowhere)


with _unheard():
    import vllm.model_executor.models.llama
    import vllm.v1.engine.llm_engine
    import vllm.v1.worker.cpu_worker  # noqa: F401
    from vllm import LLM  # noqa: F401

    import offload.vllm.connector  # noqa: F401
