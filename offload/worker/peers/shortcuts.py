"""How a peer's pool is read without its connection: mapped on this machine, or by NIXL from another."""

import logging
import threading
from collections.abc import Callable

from offload.worker.peers.landing import Landing, NixlPool
from offload.worker.peers.near import NearPool
from offload.worker.peers.nixl import NixlError
from offload.worker.peers.protocol import Memory, Reachable

logger = logging.getLogger(__name__)

NIXL_PAUSE, LONGEST_NIXL_PAUSE = 60.0, 3600.0
"""For so long a peer of which NIXL has failed is asked over TCP; longer each time, as memory may be lost."""


class Shortcuts:
    """Those to the pool of one peer. For several threads.

    Args:
        shown: the peer, for the log.
        slot_bytes: of its slots, as of ours.
        clock: seconds.
    """

    def __init__(self, shown: str, slot_bytes: int, clock: Callable[[], float]) -> None:
        self._shown = shown
        self._slot_bytes = slot_bytes
        self._clock = clock
        self._lock = threading.Lock()
        self._near: NearPool | None = None
        self._near_of: Memory | None = None
        self._far: NixlPool | None = None
        self._far_of: Reachable | None = None
        self._far_from = 0.0
        self._pause = NIXL_PAUSE
        self._is_closed = False

    @property
    def is_near(self) -> bool:
        """Whether it is mapped."""
        return self._near is not None

    @property
    def is_far(self) -> bool:
        """Whether NIXL reads it now."""
        return self._far is not None and self._clock() >= self._far_from

    def near(self, memory: Memory | None) -> NearPool | None:
        """Its pool, if that is it, is on this machine and can be had."""
        with self._lock:
            return self._near if memory == self._near_of else None

    def far(self, told: Reachable | None) -> NixlPool | None:
        """The same, to be read by NIXL, if that works."""
        with self._lock:
            return self._far if told == self._far_of and self.is_far else None

    def map(self, memory: Memory | None) -> None:
        """Have its pool mapped, if it is on this machine."""
        with self._lock:
            if memory == self._near_of:
                return
        near = None
        if memory is not None:
            try:
                near = NearPool(memory, self._slot_bytes)
            except OSError as error:
                logger.info("the pool of the peer %s comes over TCP: %s", self._shown, error)
        with self._lock:
            self._near, self._near_of = (None, None) if self._is_closed else (near, memory)

    def unmap(self) -> None:
        """Its connection is lost, and with it whether it still is there."""
        with self._lock:
            self._near, self._near_of = None, None

    def meet(self, told: Reachable, landing: Landing) -> None:
        """Have its pool read by NIXL, if it can be."""
        with self._lock:
            if told == self._far_of:
                return
            old, self._far, self._far_of = self._far, None, told
        if old is not None:
            old.forget()
        try:
            if not told.metadata:
                raise NixlError("it has none")
            far = NixlPool(landing, told, self._slot_bytes)
        except NixlError as error:
            logger.warning("the pool of the peer %s is not read by NIXL: %s", self._shown, error)
            return
        with self._lock:
            is_wanted = not self._is_closed and self._far is None and self._far_of == told
            if is_wanted:
                self._far, self._far_from = far, 0.0
        if not is_wanted:
            far.forget()

    def give_up_nixl(self, error: NixlError) -> None:
        """It has failed: slots come over TCP for a while."""
        with self._lock:
            was, pause = self.is_far, self._pause
            if was:
                self._far_from, self._pause = self._clock() + pause, min(2 * pause, LONGEST_NIXL_PAUSE)
        if was and not self._is_closed:
            text = "the pool of the peer %s comes over TCP for %g s, as NIXL has failed: %s"
            logger.warning(text, self._shown, pause, error)

    def nixl_works(self) -> None:
        """It has brought what it was to bring."""
        self._pause = NIXL_PAUSE

    def close(self) -> None:
        """Take none any more. Idempotent."""
        with self._lock:
            self._is_closed = True
            self._near, self._near_of = None, None
            far, self._far, self._far_of = self._far, None, None
        if far is not None:
            far.forget()

    def check_invariants(self) -> None:
        """What is read is known, and pauses are as long as they may be."""
        with self._lock:
            assert self._near is None or self._near_of is not None, "a pool is mapped that nobody has told of"
            assert self._far is None or self._far_of is not None, "NIXL reads what nobody has told of"
            assert not (self._is_closed and (self._near or self._far)), "a pool is read after the end"
        assert NIXL_PAUSE <= self._pause <= LONGEST_NIXL_PAUSE, f"a pause of {self._pause} s"
