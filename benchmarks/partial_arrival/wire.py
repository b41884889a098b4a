"""Two engines with a wire between them, which is cut while the one fetches a batch from the other."""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from typing import Any, NamedTuple, Self

import numpy as np

from benchmarks.long_document_qa.settings import Settings
from benchmarks.long_document_qa.workload import Prompt
from benchmarks.partial_arrival.engine import Answered, BatchProcess
from offload.testing.engines.environment import transfer_config
from offload.testing.engines.relay import Relay
from offload.testing.engines.server import held_port

__all__ = ["Cut", "Pair"]

_GIB = 2**30
_SHARED_MEMORY = "/dev/shm"
_WAIT_SECONDS = 30.0
"""So long a request waits for progress: what comes before the cut counts, however slow this machine is."""
_TRIES = 60
_FIRST_ID = 3


class Cut(NamedTuple):
    """A batch of whose KV a part came.

    Attributes:
        answered: by prompt.
        num_arrived: tokens that came, in whole blocks, of all prompts.
    """

    answered: list[Answered]
    num_arrived: int


class Pair:
    """A context manager: an engine that has KV, one that fetches it over TCP, and a relay between them.

    The pool of the first lies in a file, so the second does not read it as memory.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            port = stack.enter_context(held_port()).getsockname()[1]
            self._relay = stack.enter_context(Relay(port))
            pool = stack.enter_context(tempfile.TemporaryDirectory(prefix="partial-", dir=_SHARED_MEMORY))
            path = {"kind": "shared-memory", "path": pool}
            self._from = stack.enter_context(self._engine(listen=f"127.0.0.1:{port}", pool=path))
            peers = [f"127.0.0.1:{self._relay.port}"]
            self._to = stack.enter_context(
                self._engine(peers=peers, peer_wait_seconds=_WAIT_SECONDS, fetch_gpu_share=1)
            )
            self._meet()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._stack.close()

    def store(self, prompts: list[Prompt]) -> None:
        """The first engine has the KV of these."""
        self._from.store(prompts)

    def computed(self, prompts: list[Prompt], output_tokens: int, hints: dict[str, Any]) -> Cut:
        """They are asked of the second engine, and fetch nothing."""
        return Cut(self._to.batch(prompts, output_tokens, hints), 0)

    def fetched(
        self, prompts: list[Prompt], output_tokens: int, hints: dict[str, Any], num_bytes: int
    ) -> Cut:
        """They are asked of the second engine; after ``num_bytes`` from the first the connections are cut.

        None is made before all have been answered. Then they are, before this returns.
        """
        before = self._to.fetched_bytes()
        self._relay.cut_after(num_bytes)
        answered = self._to.batch(prompts, output_tokens, hints)
        num_blocks, rest = divmod(self._to.fetched_bytes() - before, self._settings.block_bytes)
        assert self._relay.is_down and not rest, "the wire was to be cut, and whole blocks to come"
        self._relay.let_go()
        self._meet()
        return Cut(answered, num_blocks * self._settings.block_size)

    def _engine(self, **config: Any) -> BatchProcess:
        transfer = transfer_config({"cpu_gib": self._settings.cpu_bytes / _GIB, **config})
        arguments = {"kv_transfer_config": transfer, "prefix_caching_hash_algo": "sha256_cbor"}
        return BatchProcess(self._settings, arguments)

    def _meet(self) -> None:
        """The second engine is connected to the first: it fetches. What is compiled at first use has been."""
        workload = self._settings.workload
        length = workload.document_tokens + workload.question_tokens
        rng = np.random.default_rng()
        for _ in range(_TRIES):
            prompt = rng.integers(_FIRST_ID, workload.vocab_size, length, dtype=np.int32)
            self._from.store([prompt])
            [answered] = self._to.batch([prompt], workload.output_tokens, {})
            if answered.num_computed < length:
                return
        raise RuntimeError("the second engine does not fetch from the first")
