"""Breaks the device under jobs in flight, and prints what the engine makes of it as one line of JSON.

A context that a kernel has broken is of no use to its process any more, so this is run in one of its own:
``python -m tests.gpu.broken_device``.
"""

import json
import os
import time
from typing import Any

import torch

from offload.messages import LOAD, STORE
from tests.gpu.cache import ONE_PIECE, Cache, ids
from tests.gpu.kernels import break_device, keep_writing

_SECONDS = 30


def main() -> None:
    told: dict[str, Any] = {"ends": []}
    with Cache(torch.float16, 16, ONE_PIECE) as cache:
        keep_writing(cache.raw, 200, 0)
        break_device()
        cache.engine.fence(STORE)
        cache.engine.fence(LOAD)
        cache.engine.submit(1, STORE, ids(3, 4), ids(7, 8))
        cache.load(2, ids(9), ids(5))
        _collect(cache, told["ends"], {1, 2})
        cache.engine.fence(STORE)
        cache.engine.fence(LOAD)
        cache.engine.submit(3, STORE, ids(6), ids(10))
        cache.load(4, ids(11), ids(7))
        cache.engine.cancel(1)
        _collect(cache, told["ends"], {1, 2, 3, 4})
        told["late"] = [list(end[:1]) for _ in range(3) for end in cache.engine.poll()]
        started = time.monotonic()
        told["closed"] = cache.engine.close(seconds=_SECONDS)
        told["close_seconds"] = time.monotonic() - started
        cache.is_broken = True
    told["unmapped"] = True
    print(json.dumps(told), flush=True)
    os._exit(0)  # with the cache alive: freeing memory of a broken context would end the process


def _collect(cache: Cache, ends: list[dict[str, Any]], wanted: set[int]) -> None:
    """Poll until these jobs have been reported, or too long."""
    until = time.monotonic() + _SECONDS
    while not wanted <= {end["job"] for end in ends} and time.monotonic() < until:
        for end in cache.engine.poll():
            ends.append({"job": end.job_id, "blocks": end.num_good, "error": end.error, "over": end.is_over})
        time.sleep(0.001)


if __name__ == "__main__":
    main()
