"""NIXL, the library that moves memory between machines: its agents, and whether it is here."""

import importlib
import logging
import secrets
import threading
from collections.abc import Sequence
from enum import StrEnum
from typing import Any

import numpy as np

from offload.errors import ConfigError
from offload.messages import Ids
from offload.worker.media.base import PoolSlots
from offload.worker.peers.protocol import MOST_METADATA_BYTES, Reachable

logger = logging.getLogger(__name__)

_MODULE, _BACKEND, _MEMORY = "nixl._api", "UCX", "DRAM"


class NixlError(Exception):
    """A peer's pool cannot be read by NIXL. What is under way over TCP is as it was."""


class State(StrEnum):
    """What a transfer is at, as the library calls it."""

    UNDER_WAY = "PROC"
    DONE = "DONE"
    FAILED = "ERR"
    """Parts of it may still be under way."""


def check_nixl() -> None:
    """Refuse an environment without NIXL. Imports it.

    Raises:
        ConfigError: it cannot be imported.
    """
    try:
        importlib.import_module(_MODULE)
    except Exception as error:  # its own parts raise what they like
        raise ConfigError(
            f'peer_transport is "nixl", and NIXL cannot be imported ({error}); install it with '
            f"pip install 'kv-offload[rdma]', or leave peer_transport out: KV comes over TCP"
        ) from error


class Agent:
    """One of NIXL's over UCX. For several threads: one at a time is in the library.

    Whatever the library raises is a ``NixlError``.
    """

    def __init__(self, *, serves: bool) -> None:
        """Make one; takes about a second.

        Args:
            serves: others read memory of this process. Then a thread of the library polls all the time.
        """
        self.name = f"kv-offload-{secrets.token_hex(8)}"
        self._lock = threading.Lock()
        try:
            library = importlib.import_module(_MODULE)
            config = library.nixl_agent_config(serves, False, backends=[_BACKEND])
            self._agent: Any = library.nixl_agent(self.name, config)
        except Exception as error:
            raise NixlError(f"no agent can be made: {_shown(error)}") from error
        if _BACKEND not in self._agent.backends:
            raise NixlError(f"it has no {_BACKEND}")

    def register(self, address: int, nbytes: int) -> Any:
        """Let memory be read from, or into. Returns what ``deregister`` takes. With RDMA, pins all of it."""
        place = [(address, nbytes, 0, "")]
        return self._do(lambda: self._agent.register_memory(place, _MEMORY, backends=[_BACKEND]))

    def deregister(self, registered: Any) -> None:
        """It may be unmapped, if nothing is under way."""
        self._do(lambda: self._agent.deregister_memory(registered, backends=[_BACKEND]))

    def metadata(self) -> bytes:
        """By which others reach what is registered."""
        found: bytes = self._do(lambda: self._agent.get_agent_metadata())
        return found

    def meet(self, metadata: bytes) -> str:
        """Know another agent. Returns its name."""
        name = self._do(lambda: self._agent.add_remote_agent(metadata))
        return name.decode(errors="replace") if isinstance(name, bytes) else str(name)

    def forget(self, name: str) -> None:
        """Know another agent no more. Nothing of it may be under way."""
        self._do(lambda: self._agent.remove_remote_agent(name))

    def prepare(self, name: str, there: "Ids", here: "Ids") -> Any:
        """A transfer that reads another agent's memory; nothing of it begins.

        Args:
            name: of the other agent.
            there: addresses and lengths in its memory, ``int64[n, 2]``.
            here: the same in this process's.
        """

        def prepare() -> Any:
            agent = self._agent
            sides = [agent.get_xfer_descs(_described(each), _MEMORY) for each in (here, there)]
            return agent.initialize_xfer("READ", *sides, name, b"", [_BACKEND])

        return self._do(prepare)

    def begin(self, transfer: Any) -> State:
        """Begin it. If it raises, nobody knows whether it has begun."""
        return State(self._do(lambda: self._agent.transfer(transfer)))

    def state(self, transfer: Any) -> State:
        """What it is at."""
        return State(self._do(lambda: self._agent.check_xfer_state(transfer)))

    def release(self, transfer: Any) -> None:
        """It is done. Never of one that may be under way: the library lets go of it, and it goes on."""
        self._do(lambda: self._agent.release_xfer_handle(transfer))

    def close(self) -> None:
        """Nothing is under way, and nobody reads memory of this process by it any more. Idempotent."""
        with self._lock:
            self._agent = None

    def _do(self, call: Any) -> Any:
        with self._lock:
            if self._agent is None:
                raise NixlError("it is closed")
            try:
                return call()
            except Exception as error:
                raise NixlError(_shown(error)) from error


class Exposed:
    """A pool that others may read by NIXL, until it is closed."""

    def __init__(self, slots: PoolSlots) -> None:
        """Register it. Raises NixlError."""
        self._agent = Agent(serves=True)
        self._registered = self._agent.register(slots.address, slots.num_slots * slots.slot_bytes)
        metadata = self._agent.metadata()
        if len(metadata) > MOST_METADATA_BYTES:
            raise NixlError(f"{len(metadata)} bytes of metadata")
        self.reachable = Reachable(self._agent.name, metadata, slots.address, slots.num_slots)

    def close(self) -> None:
        """Nobody reads it any more. Idempotent."""
        registered, self._registered = self._registered, None
        try:
            if registered is not None:
                self._agent.deregister(registered)
        except NixlError as error:
            logger.warning("the pool is not let go of by NIXL: %s", error)
        self._agent.close()


def expose(slots: PoolSlots) -> Exposed | None:
    """The pool for peers that read it by NIXL; None, and one line, if that cannot be."""
    try:
        return Exposed(slots)
    except NixlError as error:
        logger.warning("peers read this pool over TCP, not by NIXL: %s", error)
        return None


def _described(places: Ids) -> Any:
    """As the library takes it: with the number of a device."""
    return np.concatenate([places, np.zeros_like(places[:, :1])], axis=1).astype(np.uint64)


def _shown(error: Exception) -> str:
    return str(error) or type(error).__name__


def places_of(address: int, slot_bytes: int, edges: Sequence[tuple[int, int]], slots: Ids) -> Ids:
    """Addresses and lengths of runs of slots, ``int64[n, 2]``; ``edges``: where in ``slots`` each lies."""
    return np.array(
        [[address + int(slots[start]) * slot_bytes, (stop - start) * slot_bytes] for start, stop in edges],
        dtype=np.int64,
    ).reshape(-1, 2)
