"""What runs in the processes of the benchmark: one connector each, as in an engine."""

from __future__ import annotations

import logging
from typing import Any

from vllm.utils.gc_utils import freeze_gc_heap

from benchmarks.control_plane.asked_again import AskedEngine
from benchmarks.control_plane.decode import DecodeEngine
from benchmarks.control_plane.memory import MemoryEngine
from benchmarks.control_plane.prompts import PromptEngine

__all__ = ["make"]

_Subject = PromptEngine | DecodeEngine | MemoryEngine | AskedEngine


def make(kind: str, connector: str, *arguments: Any) -> _Subject:
    """The subject of one kind of measurement; of `prompts`, the last argument is blocks resident before."""
    logging.disable(logging.WARNING)
    if kind == "asked_again":
        return AskedEngine(connector, *arguments)
    if kind == "memory":
        return MemoryEngine(connector, *arguments)
    if kind == "decode":
        decode = DecodeEngine(connector, *arguments)
        freeze_gc_heap()
        return decode
    *sizes, resident = arguments
    prompts = PromptEngine(connector, *sizes)
    freeze_gc_heap()  # as vLLM's engine core does once it has started
    prompts.fill(resident)
    return prompts
