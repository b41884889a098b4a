"""What runs in the processes of the benchmark: one connector each, as in an engine."""

from __future__ import annotations

import logging
from multiprocessing.connection import Connection

from vllm.utils.gc_utils import freeze_gc_heap

from benchmarks.control_plane.decode import DecodeEngine
from benchmarks.control_plane.memory import MemoryEngine
from benchmarks.control_plane.prompts import PromptEngine
from benchmarks.control_plane.sizes import BLOCK_TOKENS

__all__ = ["serve"]


class Prompts:
    """Serves prompts; ``resident`` blocks are in the pool before the first one."""

    def __init__(self, connector: str, longest: int, num_slots: int, resident: int) -> None:
        self._engine = PromptEngine(connector, longest, num_slots)
        freeze_gc_heap()  # as vLLM's engine core does once it has started
        self._engine.fill(resident)

    def cold(self, seed: str, tokens: int) -> dict[str, int]:
        """See ``PromptEngine``."""
        return self._engine.cold(seed, tokens // BLOCK_TOKENS)

    def warm(self, seed: str, tokens: int) -> dict[str, int]:
        """See ``PromptEngine``."""
        return self._engine.warm(seed, tokens // BLOCK_TOKENS)


class Decode:
    """Counts the time of decode steps."""

    def __init__(self, connector: str, num_steps: int) -> None:
        self._engine = DecodeEngine(connector, num_steps)
        freeze_gc_heap()

    def steps(self) -> list[dict[str, int]]:
        """See ``DecodeEngine``."""
        return self._engine.steps()


_KINDS = {"prompts": Prompts, "decode": Decode, "memory": MemoryEngine}


def serve(connection: Connection, kind: str, arguments: tuple[object, ...]) -> None:
    """Body of a child: make one of the above, then answer calls until the connection is closed."""
    logging.disable(logging.WARNING)
    try:
        subject = _KINDS[kind](*arguments)  # type: ignore[arg-type]
        connection.send((True, None))
        while True:
            name, *values = connection.recv()
            connection.send((True, getattr(subject, name)(*values)))
    except EOFError:
        pass
    except Exception as error:
        connection.send((False, f"{type(error).__name__}: {error}"))
        raise
