"""Names of weights: under which of them what is computed since a reset is kept below the pool."""

import hashlib
import threading

from offload.errors import OperatorError
from offload.messages import NAMED, SUFFIX_BYTES

MOST_CHARACTERS = 256
"""Of a name."""

_REMEDY = "Pause the engine, load the weights, reset its prefix cache with the connector's, then name them"


class Weights:
    """Says what the weights are since the last reset, if whoever has loaded them has said so.

    Each reset may be named once, and only before anything is computed after it. So nothing of other weights
    can come under that name, and a name that comes too soon or too late costs misses.

    A name comes on the operator socket's thread, while the engine may make no step. The engine's thread takes
    it up before the next request is served.
    """

    def __init__(self) -> None:
        """The weights are those that the engine was started with."""
        self._lock = threading.Lock()
        self._refusal: str | None = f"nothing was reset since the engine was started. {_REMEDY}"
        self._num_resets = 0
        self._version: str | None = None
        self._is_new = False

    @property
    def told(self) -> dict[str, object]:
        """How it stands, for operators."""
        return {"num_resets": self._num_resets, "version": self._version}

    def name(self, version: str, after: int | None = None) -> int:
        """The weights since the last reset, on any thread. Returns which reset that is.

        Args:
            version: the name. Engines that share a tier share what has the same one.
            after: the number of the reset that is meant; None: whichever was the last.

        Raises:
            OperatorError: it may not be named any more, or another is the last.
        """
        if not isinstance(version, str) or not 0 < len(version) <= MOST_CHARACTERS:
            raise OperatorError(
                f"a name of weights has 1 to {MOST_CHARACTERS} characters, not {version!r:.50}"
            )
        if not _is_text(version):  # as of an argument that is no UTF-8
            raise OperatorError(f"the name of weights {version!r:.50} is no text; give it as UTF-8")
        with self._lock:
            if after is not None and after != self._num_resets:
                raise OperatorError(f"the last reset is number {self._num_resets}, not {after!r}")
            if self._version == version:
                return self._num_resets
            if self._version is not None:
                raise OperatorError(
                    f"the weights since the last reset are named {self._version!r}. {_REMEDY}"
                )
            if self._refusal is not None:
                raise OperatorError(self._refusal)
            self._version, self._is_new = version, True
            return self._num_resets

    def reset(self, num_cached: int) -> None:
        """There are other weights, maybe; the engine's own cache still has so many blocks."""
        with self._lock:
            self._num_resets += 1
            self._version, self._is_new = None, False
            self._refusal = None
            if num_cached:
                left = f"the engine's own prefix cache had {num_cached} blocks left after the last reset"
                self._refusal = f"{left}. {_REMEDY}"

    def take(self, *, is_last: bool) -> bytes | None:
        """The suffix of a new name, once; ``is_last``: something is computed now, so no other may come."""
        if self._refusal is not None:
            return None
        with self._lock:
            if is_last:
                self._refusal = f"something was computed since the last reset. {_REMEDY}"
            if not self._is_new or self._version is None:
                return None
            self._is_new = False
            self._refusal = f"the weights since the last reset have a name. {_REMEDY}"
            return suffix_of(self._version)

    def check_invariants(self) -> None:
        """A name is of a reset, and only one that was given can be new."""
        assert self._num_resets or self._version is None, f"{self._version!r} is a name of no reset"
        assert self._version is not None or not self._is_new, "what is new is no name"


def _is_text(version: str) -> bool:
    """Whether it can be written as UTF-8, which what comes as JSON need not."""
    try:
        version.encode()
    except UnicodeEncodeError:
        return False
    return True


def suffix_of(version: str) -> bytes:
    """Behind names of extents of weights of that name, 16 bytes."""
    return NAMED + hashlib.sha256(f"weights_version\n{version}".encode()).digest()[: SUFFIX_BYTES - 1]
