"""Whether a Mooncake Store can be had, and keeps what is written: tried in a process of its own.

The library starts threads, holds the interpreter while it connects, and waits long for a master that hangs.
None of that is for a process that serves requests, or that forks one.
"""

import json
import os
import subprocess
import sys
import time
from dataclasses import asdict
from importlib.util import find_spec

import numpy as np

from offload.errors import TierError
from offload.mooncake_config import MooncakeConfig
from offload.worker.media.mooncake import MooncakeClient, MooncakeGoneError, explained, load_library, reach
from offload.worker.media.resp_check import StoreGoneError, StoreProbe
from offload.worker.media.store_names import KEY_PREFIX

_TRIED_BYTES = 1 << 20
_WAIT_SECONDS = 20.0
_NO_MEMORY = -200


def probe_mooncake(tier: MooncakeConfig) -> StoreProbe:
    """Write a MiB, read it back, and delete it.

    Raises:
        StoreGoneError: the master does not answer, or nobody brings memory. Both may come.
        TierError: Mooncake is not installed here, or does not give back what was written.
        ConfigError: a file of the configuration cannot be read.
    """
    _ = tier.name_key  # that it can be read is all that is asked
    if find_spec("mooncake") is None:
        load_library()  # says what to install
    remedy = "Start it, or correct master_server_address, or remove the tier"
    try:
        reach(tier)
        found = _ask(tier, "probe")
    except OSError as error:
        raise StoreGoneError(f"the store {tier} does not answer: {error}. {remedy}") from error
    if "error" in found:
        is_gone = found.get("is_gone", False)
        raise (StoreGoneError if is_gone else TierError)(f"the store {tier}: {found['error']}")
    return StoreProbe(float(str(found["seconds"])), "")


def try_to_connect(tier: MooncakeConfig) -> None:
    """See whether a client gets an answer.

    Raises:
        OSError: it does not, or not in time.
    """
    found = _ask(tier, "connect")
    if "error" in found:
        raise MooncakeGoneError(str(found["error"]))


def _ask(tier: MooncakeConfig, what: str) -> dict[str, object]:
    settings = asdict(tier)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "offload.worker.media.mooncake_check", what],
            input=json.dumps(settings).encode(),
            capture_output=True,
            timeout=_WAIT_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise MooncakeGoneError(f"no answer within {_WAIT_SECONDS:g} s") from error
    answer = done.stdout.decode(errors="replace").strip().rpartition("\n")[2]
    if not answer.startswith("{"):
        said = done.stderr.decode(errors="replace").strip()[-500:]
        raise MooncakeGoneError(f"Mooncake has ended with status {done.returncode}: {said}")
    found: dict[str, object] = json.loads(answer)
    return found


def _main(what: str) -> dict[str, object]:
    try:
        client = MooncakeClient(MooncakeConfig(**json.load(sys.stdin)))
        began = time.monotonic()
        [code] = client.exist([f"{KEY_PREFIX.decode()}probe"])
        seconds = time.monotonic() - began
        if code < 0:
            return {"error": explained(code), "is_gone": True}
        return {"seconds": seconds} if what == "connect" else _try(client) | {"seconds": seconds}
    except TierError as error:
        return {"error": str(error), "is_gone": False}
    except OSError as error:
        return {"error": str(error), "is_gone": True}


def _try(client: MooncakeClient) -> dict[str, object]:
    """Write a MiB, read it back, and delete it."""
    key = f"{KEY_PREFIX.decode()}probe:{os.urandom(8).hex()}"
    memory = np.frombuffer(bytearray(os.urandom(_TRIED_BYTES) + bytes(_TRIED_BYTES)), dtype=np.uint8)
    address = memory.ctypes.data
    client.register(address, 2 * _TRIED_BYTES)
    [code] = client.put([key], [[address]], [[_TRIED_BYTES]])
    if code == _NO_MEMORY:
        return {
            "error": "it has no memory: start processes that bring some, such as mooncake_client with "
            "--global_segment_size, or give it more",
            "is_gone": True,
        }
    if code:
        return {"error": f"a MiB cannot be written: {explained(code)}", "is_gone": True}
    [length] = client.get([key], [[address + _TRIED_BYTES]], [[_TRIED_BYTES]])
    client.remove([key])
    if length != _TRIED_BYTES or not np.array_equal(memory[:_TRIED_BYTES], memory[_TRIED_BYTES:]):
        return {"error": "it has not given back a MiB that was written a moment before", "is_gone": False}
    return {}


if __name__ == "__main__":
    print(json.dumps(_main(sys.argv[1])), flush=True)
    os._exit(0)  # the library's own end may take seconds
