"""A peer in a process of its own, which tests kill:

    python -m tests.offload.worker.peers.lone SLOTS SLOT_BYTES SEED [OPTIONS]

It holds ``names(SLOTS, SEED)`` with ``contents(SLOTS, SLOT_BYTES, SEED)``, says its port, and serves until
its input ends. ``--near``, ``--nixl`` and ``--port PORT``: as ``PeerPool`` has them. ``--stall PIECES``: it
sends so many slots of an answer, and then nothing more.
"""

import argparse
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from offload.fleet_config import Address
from offload.worker.peers import session
from tests.nixl import need_nixl
from tests.offload.worker.peers.pools import PeerPool, contents, names


class LonePeer:
    """The process, as a test has it."""

    def __init__(self, num_slots: int, slot_bytes: int, seed: int, *options: str) -> None:
        arguments = [str(num_slots), str(slot_bytes), str(seed), *options]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tests.offload.worker.peers.lone", *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=os.getcwd(),
        )
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], 60)
        assert ready, "the peer does not start"
        while not (line := self.process.stdout.readline()).strip().isdigit():  # libraries speak there, too
            assert line, "the peer does not start"
        self.address = Address("127.0.0.1", int(line))

    def stop(self) -> None:
        """It does nothing from now on, and its connections stay."""
        self.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, self.process.pid, os.WSTOPPED | os.WNOWAIT)

    def go_on(self) -> None:
        """It does again what it did before ``stop``."""
        self.process.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(30)

    def close(self) -> None:
        self.kill()
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()


@contextmanager
def lone(num_slots: int, slot_bytes: int, seed: int, *options: str) -> Iterator[LonePeer]:
    """One of them, until the end."""
    peer = LonePeer(num_slots, slot_bytes, seed, *options)
    try:
        yield peer
    finally:
        peer.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("slots", "slot_bytes", "seed"):
        parser.add_argument(name, type=int)
    parser.add_argument("--near", action="store_true")
    parser.add_argument("--nixl", action="store_true")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--stall", type=int)
    options = parser.parse_args()
    if options.nixl:
        need_nixl()
    count, size, seed = options.slots, options.slot_bytes, options.seed
    peer = PeerPool(
        count,
        size,
        columns=1,
        is_near=options.near,
        has_nixl=options.nixl,
        port=options.port,
        peer=b"lone%04d" % seed,
        epoch=os.urandom(8),
    )
    peer.store(names(count, seed), contents(count, size, seed))
    if options.stall is not None:
        pieces = peer.shown.pieces

        def one_by_one(rows: Any) -> Any:
            return [part[at : at + size] for part in pieces(rows) for at in range(0, len(part), size)]

        peer.shown.pieces = one_by_one  # type: ignore[assignment, method-assign]
        session._VIEWS = options.stall + 1  # the head, and so many pieces
        session_get = session.Session._get

        def stall(self: Any, get: Any, life: Any) -> Any:
            for index, wants in enumerate(session_get(self, get, life)):
                if index:
                    threading.Event().wait()
                yield wants

        session.Session._get = stall  # type: ignore[method-assign]
    print(peer.server.port, flush=True)
    sys.stdin.read()
    peer.close()


if __name__ == "__main__":
    main()
