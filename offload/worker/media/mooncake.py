"""The client of Mooncake Store, which is a library in C++: what it must be told, and what its codes mean."""

import ctypes
import importlib
import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from offload.errors import TierError
from offload.mooncake_config import MooncakeConfig

CONNECT_SECONDS = 1.0

Addresses = Sequence[Sequence[int]]
"""Of the pieces of each value: where they lie, or how many bytes they have."""

_PACKAGE = "mooncake-transfer-engine, or mooncake-transfer-engine-non-cuda on a machine without CUDA"
_ENVIRONMENT = {"MC_RPC_TIMEOUT_MS": "2000", "MC_STORE_CLIENT_SETUP_RETRIES": "1"}
"""What the library reads, where the user has not set it. By itself it waits for a master for 30 seconds, and
tries 20 times to connect to one that is gone."""
_QUIET = 3
"""Only what ends the process is logged. Each failed transfer would be a dozen lines."""

_LOG_LEVEL = "GLOG_minloglevel"

_THERE_ALREADY = -705
_ABSENT = {-702, -703, -704, -710, -712}
"""No replica, or none that is whole; no such object."""
_GONE = {-900, -901, -1010}
"""The master does not answer, or not in time, or is none at present."""
_WHAT = {
    -200: "the store has no room, or nobody brings memory to it",
    -600: "its size has changed",
    -707: "the lease was over before the last byte",
    -800: "the transfer failed; whoever holds its bytes may be gone",
    -900: "the master does not answer",
    -901: "the master does not answer in time",
}


class MooncakeGoneError(OSError):
    """The master does not answer."""


def is_absent(code: int) -> bool:
    """Whether that says that an object is not there."""
    return code in _ABSENT


def is_gone(code: int) -> bool:
    """Whether that says that the master is not there."""
    return code in _GONE


def is_kept(code: int) -> bool:
    """Whether that says of a put that the object is there."""
    return code in (0, _THERE_ALREADY)


def explained(code: int) -> str:
    """What a code says."""
    return f"{_WHAT.get(code, 'Mooncake refuses')} ({code})"


def reach(config: MooncakeConfig, seconds: float = CONNECT_SECONDS) -> str:
    """See whether somebody listens where the master should. Returns the address of this host that it sees.

    The library itself waits for 4 seconds where nobody does.

    Raises:
        OSError: nobody does, or not in time.
    """
    with socket.create_connection(config.master, seconds) as connection:
        address: str = connection.getsockname()[0]
        return address


def load_library() -> Any:
    """The library's module. It starts threads, so no process that forks later may call this.

    Raises:
        TierError: it is not installed, or cannot be loaded.
    """
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        module = importlib.import_module("mooncake.store")
    except ModuleNotFoundError as error:
        raise TierError(f"a tier of kind mooncake needs a package: pip install {_PACKAGE}") from error
    except ImportError as error:
        raise TierError(
            f"Mooncake cannot be loaded: {error}. Install what it lacks (Debian: apt-get install libibverbs1 "
            f"libnuma1 libcurl4), or another build of it: {_PACKAGE}"
        ) from error
    _hush()
    return module


class MooncakeClient:
    """A client that brings no memory to the store. For several threads.

    What it is asked takes as long as the network, and where the master or an owner is gone, seconds: 4.5
    where nobody listens, 2 where a master hangs, 60 where the owner of a value does. Connecting holds the
    interpreter.
    """

    def __init__(self, config: MooncakeConfig) -> None:
        """Connect.

        Raises:
            OSError: nobody listens there, or it does not take us.
            TierError: there is no such library here.
        """
        local = reach(config)
        module = load_library()
        self._store = module.MooncakeDistributedStore()
        self._replicate = module.ReplicateConfig()
        others = {} if config.tenant_id == "default" else {"tenant_id": config.tenant_id}
        code = self._store.setup(
            local if config.local_hostname is None else config.local_hostname,
            config.metadata_server,
            0,
            0,
            config.protocol,
            config.device_name,
            config.master_server_address,
            **others,
        )
        if code:
            raise MooncakeGoneError(
                f"the master does not take us ({code}); its version must be that of the package here, and "
                f"protocol and device_name must be ones that this machine has"
            )

    def register(self, address: int, num_bytes: int) -> None:
        """Let values be moved from and to that memory, as long as the client lives.

        Raises:
            OSError: it is refused.
        """
        code = self._store.register_buffer(address, num_bytes)
        if code:
            raise MooncakeGoneError(f"{num_bytes} bytes of memory cannot be registered ({code})")

    def unregister(self, address: int) -> None:
        """No value is moved from or to memory that was registered at that address any more."""
        self._store.unregister_buffer(address)

    def exist(self, keys: Sequence[str]) -> list[int]:
        """1 or 0 for each, or a code. Those that are there are evicted later."""
        return list(self._store.batch_is_exist(keys))

    def sizes(self, keys: Sequence[str]) -> list[int]:
        """Bytes of each, or a code."""
        found = self._store.batch_get_replica_desc(keys)
        return [self._size(key, found.get(key, ())) for key in keys]

    def put(self, keys: Sequence[str], addresses: Addresses, sizes: Addresses) -> list[int]:
        """Put values that are not there from registered memory; a code for each."""
        return list(self._store.batch_put_from_multi_buffers(keys, addresses, sizes, self._replicate))

    def get(self, keys: Sequence[str], addresses: Addresses, sizes: Addresses) -> list[int]:
        """Get values into registered memory; their bytes, or a code. Sizes must be exact, no key twice."""
        return list(self._store.batch_get_into_multi_buffers(keys, addresses, sizes))

    def remove(self, keys: Sequence[str]) -> None:
        """Delete these, whoever reads them."""
        self._store.batch_remove(keys, True)

    def remove_matching(self, pattern: str) -> int:
        """Delete what a regular expression matches; how many, or a code."""
        return int(self._store.remove_by_regex(pattern, True))

    def close(self) -> None:
        """Say goodbye. Takes seconds if the master is gone, and holds the interpreter meanwhile."""
        self._store.close()

    def _size(self, key: str, replicas: Sequence[Any]) -> int:
        for replica in replicas:
            if replica.is_memory_replica():
                return int(replica.get_memory_descriptor().buffer_descriptor.size)
        return int(self._store.get_size(key))  # on a disk of the store, or not there


def _hush() -> None:
    """Keep the library from logging to stderr, unless the user has said how much it may."""
    with suppress(OSError, ValueError):
        wanted = int(os.environ.get(_LOG_LEVEL, _QUIET))
        maps = Path("/proc/self/maps").read_text().splitlines()
        for path in {line.split(maxsplit=5)[-1] for line in maps if "libglog" in line}:
            ctypes.c_int32.in_dll(ctypes.CDLL(path), "_ZN3fLI17FLAGS_minloglevelE").value = wanted
