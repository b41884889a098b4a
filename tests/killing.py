"""A child that tells what it does, and is killed at a moment that is drawn."""

import multiprocessing
import os
import random
import select
import signal
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn


class Moment(NamedTuple):
    """When a child is killed.

    Attributes:
        told: what it has told.
        most_times: so often, at most.
        most_seconds: so long after that, at most.
    """

    told: bytes
    most_times: int
    most_seconds: float


def live_and_die(
    live: Callable[..., NoReturn], arguments: Sequence[Any], moments: Sequence[Moment], rng: random.Random
) -> str:
    """Start a child, and kill it at one of these moments; returns what it has told.

    Args:
        live: what it does. Behind ``arguments`` come a seed and a descriptor to tell lines at.
        arguments: the first ones.
        moments: one is drawn.
        rng: draws.

    Raises:
        RuntimeError: it has ended by itself.
    """
    read_fd, write_fd = os.pipe()
    fork = multiprocessing.get_context("fork")
    child = fork.Process(target=live, args=(*arguments, rng.randrange(1 << 30), write_fd), daemon=True)
    child.start()
    os.close(write_fd)
    told, until = b"", time.monotonic() + 60
    awaited, times, seconds = rng.choice(moments)
    times, seconds = rng.randint(1, times), rng.uniform(0, seconds)
    while time.monotonic() < until:
        ready, _, _ = select.select([read_fd], [], [], max(0.0, min(1.0, until - time.monotonic())))
        if ready:
            got = os.read(read_fd, 1 << 16)
            if not got:
                raise RuntimeError(f"the child has ended by itself, status {child.exitcode}")
            told += got
            if times and told.count(awaited) >= times:
                times, until = 0, time.monotonic() + seconds
    assert child.pid is not None
    os.kill(child.pid, signal.SIGKILL)
    while got := os.read(read_fd, 1 << 16):
        told += got
    os.close(read_fd)
    child.join()
    return told.decode()
