"""Lets a transfer engine go on between two steps of vLLM's."""

import logging
import threading
from collections.abc import Callable, Iterable

from offload.worker.lanes import Lane

logger = logging.getLogger(__name__)

_CLOSE_SECONDS = 1.0
_LOOK_SECONDS = 0.001
"""Between two looks at what other ranks do."""


class Pump:
    """A thread that calls ``go_on`` whenever it is woken. Calls that come meanwhile are one.

    As long as ``go_on`` says that there is something that will wake nobody, it is called again soon.
    """

    def __init__(self, go_on: Callable[[], bool]) -> None:
        """Start the thread."""
        self._go_on = go_on
        self._is_wanted = threading.Event()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="kv-offload-pump", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Something has ended. From any thread; never waits."""
        self._is_wanted.set()

    @classmethod
    def of(cls, lanes: Iterable[Lane], go_on: Callable[[], bool]) -> "Pump | None":
        """One that is woken whenever something below the pool has moved on threads; None if nothing does."""
        runners = [runner for lane in lanes if (runner := lane.runner) is not None]
        if not runners:
            return None
        pump = cls(go_on)
        for runner in runners:
            runner.on_end = pump.wake
        return pump

    def close(self) -> None:
        """End the thread; one that does not end soon is left alone."""
        self._is_closed = True
        self._is_wanted.set()
        self._thread.join(_CLOSE_SECONDS)

    def _run(self) -> None:
        looks_again = False
        while True:
            self._is_wanted.wait(_LOOK_SECONDS if looks_again else None)
            if self._is_closed:
                return
            self._is_wanted.clear()
            looks_again = False
            try:
                looks_again = self._go_on()
            except Exception:  # the engine's own next look meets it again
                logger.exception("the transfer engine could not go on between steps")
