"""Servers that a benchmark starts: all of one small model with random weights, on the CPU backend."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

from offload.testing.engines.environment import ONE_PROCESS, ONE_PROCESS_FLAGS
from offload.testing.engines.models import tiny_llama
from offload.testing.engines.server import ServerProcess, held_port

__all__ = ["Servers"]


class Servers:
    """A context manager: what was started in it ends with it.

    Args:
        longest: tokens of the longest prompt with its answer.
        block: tokens of a block.
        vocabulary: token ids of the model, which has a tokenizer.
        step_tokens: that a step computes at most.
        gpu_tokens: that the engine's cache has room for.
        hidden_size, layers, heads: of the model.
        is_one_process: workers are in the process of their scheduler.
    """

    def __init__(
        self,
        longest: int,
        *,
        block: int,
        vocabulary: int,
        step_tokens: int,
        gpu_tokens: int,
        hidden_size: int = 256,
        layers: int = 8,
        heads: int = 8,
        is_one_process: bool = True,
    ) -> None:
        self._model = tiny_llama(
            hidden_size=hidden_size,
            layers=layers,
            heads=heads,
            kv_heads=heads,
            vocab_size=vocabulary,
            max_position_embeddings=2 * longest,
            with_tokenizer=True,
        )
        self._flags: dict[str, object] = {
            "--dtype": "float32",
            "--block-size": block,
            "--max-model-len": longest,
            "--max-num-batched-tokens": step_tokens,
            "--num-gpu-blocks-override": gpu_tokens // block,
            **(ONE_PROCESS_FLAGS if is_one_process else {}),
        }
        self._variables = ONE_PROCESS if is_one_process else {}
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        self._folder = Path(self._stack.enter_context(tempfile.TemporaryDirectory()))
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()

    def port(self) -> int:
        """One that nobody else gets, but for a server that is told to use it."""
        return int(self._stack.enter_context(held_port()).getsockname()[1])

    def start(
        self,
        name: str,
        extra_config: Mapping[str, Any] | None,
        flags: Mapping[str, object] = {},
        variables: Mapping[str, str] = {},
    ) -> ServerProcess:
        """Start one more; ``name``: unlike those of others. The rest is as ``ServerProcess`` has it."""
        folder = self._folder / name
        folder.mkdir()
        whole, variables = {**self._flags, **flags}, {**self._variables, **variables}
        return self._stack.enter_context(ServerProcess(folder, self._model, whole, extra_config, variables))
