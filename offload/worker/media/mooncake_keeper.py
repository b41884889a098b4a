"""Ends what engines that were reset have left in a Mooncake Store, whose client cannot list keys."""

import re
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import numpy as np

from offload.messages import SUFFIX_BYTES, is_private
from offload.worker.media.mooncake import MooncakeClient, MooncakeGoneError, explained, is_absent, is_kept
from offload.worker.media.store_keeper import ALIVE, ALIVE_SECONDS, PRIVATE_LIST
from offload.worker.media.store_names import Whose

MOST_ENGINES = 16
"""That are listed at a time, for one rank. What others leave is evicted by the store."""

_EVERY_SECONDS = 20.0
_BEAT_BYTES = 8
_OVER = b"\xff" * _BEAT_BYTES


class MooncakeKeeper:
    """Lists engines that have private extents, for one rank, and deletes these when an engine is over.

    The list is a few keys, each with the suffix of one engine: whoever puts a key that is not there has it.
    An engine says that it lives with a number that changes. One whose number has not changed for a minute, or
    that has said that it ends, is over: a regular expression deletes what only it could find.
    """

    def __init__(
        self,
        client: Callable[[], MooncakeClient | None],
        whose: Whose,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Begin with nothing of its own.

        Args:
            client: who is asked; None: nobody can be, at present. ``scratch`` is registered there.
            whose: of whom the extents are.
            clock: in seconds.
        """
        self.scratch = np.zeros((2, SUFFIX_BYTES), dtype=np.uint8)
        """What is put, and what is got."""
        self._client, self._clock = client, clock
        self._prefix = whose.prefix.decode()
        listed = (PRIVATE_LIST + whose.digest.hex().encode()).decode()
        self._keys = [f"{listed}-{index}" for index in range(MOST_ENGINES)]
        self._lock = threading.Lock()
        self._own: bytes | None = None  # the suffix of what is private of this engine
        self._num_beats = 0
        self._seen: dict[bytes, tuple[bytes | None, float]] = {}  # by suffix: its number, and since when
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kv-offload-store-keeper", daemon=True)

    def start(self) -> None:
        """Look again and again, on a thread."""
        self._thread.start()

    def note(self, suffix: bytes) -> None:
        """Extents with that suffix are about to be written. A few calls, once for each suffix."""
        if not is_private(suffix) or len(suffix) != SUFFIX_BYTES or suffix == self._own:
            return
        with self._lock:
            client = self._client()
            if client is None or suffix == self._own:
                return
            self._own = suffix  # a look lists it where this fails
            with suppress(OSError):
                self._beat(client)
                self._claim(client, self._listed(client))

    def look(self) -> None:
        """Say that this engine lives, and end what others have left.

        Raises:
            OSError: the store cannot be asked.
        """
        with self._lock:
            client = self._client()
            if client is None:
                self._seen.clear()  # nobody could say that it lives
                return
            try:
                listed = self._listed(client)
                if self._own is not None:
                    self._beat(client)
                    self._claim(client, listed)
                self._seen = {each: self._seen[each] for each in listed.values() if each in self._seen}
                for key, suffix in listed.items():
                    if suffix != self._own and self._is_over(client, suffix):
                        self._end(client, key, suffix)
            except OSError:
                self._seen.clear()
                raise

    def close(self, seconds: float) -> bool:
        """This engine is over. Returns whether nothing is asked any more. Idempotent."""
        self._is_closed.set()
        if self._thread.ident is not None:
            self._thread.join(seconds)
        return not self._thread.is_alive()

    def check_invariants(self) -> None:
        """What is its own is private, and few others are known."""
        assert self._own is None or is_private(self._own), f"{self._own!r} is its own"
        assert len(self._seen) <= MOST_ENGINES, f"{len(self._seen)} engines are listed"

    # Private

    def _run(self) -> None:
        while not self._is_closed.is_set():
            with suppress(OSError):
                self.look()
            self._is_closed.wait(_EVERY_SECONDS)
        with self._lock:
            client = self._client()
            if client is not None and self._own is not None:
                self._say(client, _OVER)

    def _beat(self, client: MooncakeClient) -> None:
        self._num_beats += 1
        self._say(client, self._num_beats.to_bytes(_BEAT_BYTES, "little"))

    def _say(self, client: MooncakeClient, beat: bytes) -> None:
        assert self._own is not None
        key = _alive_key(self._own)
        client.remove([key])
        self._put(client, key, beat)

    def _listed(self, client: MooncakeClient) -> dict[str, bytes]:
        """Suffixes by key."""
        are_there = client.exist(self._keys)
        keys = [key for key, code in zip(self._keys, are_there, strict=True) if code == 1]
        found = {key: self._get(client, key, SUFFIX_BYTES) for key in keys}
        return {key: suffix for key, suffix in found.items() if suffix is not None and is_private(suffix)}

    def _claim(self, client: MooncakeClient, listed: dict[str, bytes]) -> None:
        """See that this engine is listed, if there is room."""
        assert self._own is not None
        if self._own in listed.values():
            return
        for key in self._keys:
            is_there = key not in listed and self._put(client, key, self._own)
            if is_there and self._get(client, key, SUFFIX_BYTES) == self._own:
                return

    def _is_over(self, client: MooncakeClient, suffix: bytes) -> bool:
        beat, now = self._get(client, _alive_key(suffix), _BEAT_BYTES), self._clock()
        if beat == _OVER:
            return True
        last, since = self._seen.setdefault(suffix, (beat, now))
        if beat is not None and beat != last:
            self._seen[suffix] = (beat, now)
            return False
        return now - since >= ALIVE_SECONDS

    def _end(self, client: MooncakeClient, key: str, suffix: bytes) -> None:
        pattern = f"^{re.escape(self._prefix)}[0-9a-f]+:{suffix.hex()}$"
        if client.remove_matching(pattern) >= 0:
            client.remove([_alive_key(suffix), key])

    def _put(self, client: MooncakeClient, key: str, value: bytes) -> bool:
        """Whether it is there, or another is."""
        self.scratch[0, : len(value)] = np.frombuffer(value, dtype=np.uint8)
        [code] = client.put([key], [[self.scratch[0].ctypes.data]], [[len(value)]])
        return is_kept(code)

    def _get(self, client: MooncakeClient, key: str, num_bytes: int) -> bytes | None:
        """None: it is not there, or is none of ours."""
        [code] = client.sizes([key])
        if code == num_bytes:
            [code] = client.get([key], [[self.scratch[1].ctypes.data]], [[num_bytes]])
        if code < 0 and not is_absent(code):
            raise MooncakeGoneError(explained(code))
        return self.scratch[1, :num_bytes].tobytes() if code == num_bytes else None


def _alive_key(suffix: bytes) -> str:
    return (ALIVE + suffix.hex().encode()).decode()
