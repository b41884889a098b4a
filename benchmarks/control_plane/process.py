"""The benchmark's processes: one holds one connector, so that no other's objects and garbage count."""

from __future__ import annotations

from functools import partial
from typing import Any

from offload.testing.engines.process import EngineProcess

__all__ = ["child_of"]

_QUIET = {"VLLM_LOGGING_LEVEL": "ERROR"}


def child_of(kind: str, connector: str, *arguments: Any) -> EngineProcess[Any]:
    """Where `child.make` is called with these. It is forked from one that has only imported vLLM."""
    made = partial(_make, kind, connector, *arguments)
    return EngineProcess(made, connector, variables=_QUIET, fork_from=["benchmarks.control_plane.child"])


def _make(*arguments: Any) -> Any:
    from benchmarks.control_plane import child  # not over here: it imports vLLM

    return child.make(*arguments)
