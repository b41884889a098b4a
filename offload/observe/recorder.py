"""Records live traffic as a trace: hashes and lengths of finished requests, never tokens.

The format is that of ``trace``. An id stands for 512 tokens and all before them: the engine's own prefix hash
at that position, cut to 63 bits. Whether equal prompts have equal hashes in another run is for vLLM to say.
With its sha256 algorithms they have, with xxhash only if ``PYTHONHASHSEED`` is set.

How an answer ended is written as a name without meaning, which is another one in the next recording.
"""

import json
import logging
import os
import time
from collections.abc import Callable, Hashable, Sequence
from hashlib import blake2b
from pathlib import Path

import numpy as np

from offload.errors import ConfigError
from offload.observe.trace import IDS_BLOCK_TOKENS
from offload.observe.trace_writer import TraceWriter

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 3.0
"""How long the end of an engine waits at most for lines to be written."""

_FLUSH_SECONDS = 5.0
_FLUSH_BYTES = 1 << 20
_ID_BYTES = 8
_NAME_BYTES = 4


def check_divides(block_size: int) -> None:
    """Refuse blocks that do not end where the ids of a trace do.

    Raises:
        ConfigError: ``block_size`` tokens do not divide ``IDS_BLOCK_TOKENS``.
    """
    if IDS_BLOCK_TOKENS % block_size:
        raise ConfigError(
            f"record_trace is set and the block size is {block_size}, which does not divide the "
            f"{IDS_BLOCK_TOKENS} tokens of an id in a trace; use --block-size 16 or, for a model with "
            "states, remove record_trace"
        )


class TraceRecorder:
    """Records a line per request in a file that is new: an existing one is left alone, see ``path``.

    Lines are kept and handed over every few seconds to a thread that writes them, whole lines only. Nobody
    waits for it: if it does not keep up, lines are dropped with one warning. A fault in writing ends the
    recording with a warning and is nobody else's.
    """

    def __init__(self, path: Path, block_size: int, clock: Callable[[], float] = time.time) -> None:
        """Begin a recording; the file is made with the first lines.

        Args:
            path: of the file. If that exists when the first lines are written: ``name.2.ext`` and so on.
            block_size: tokens per prefix hash.
            clock: that of arrival times, in seconds.

        Raises:
            ConfigError: blocks that do not divide the ids of a trace.
        """
        check_divides(block_size)
        self._stride = IDS_BLOCK_TOKENS // block_size
        self._clock = clock
        self._began = self._flushed = clock()
        self._writer = TraceWriter(path)
        self._key = os.urandom(16)
        self._lines: list[bytes] = []
        self._num_bytes = 0
        self.num_dropped = 0
        """Requests that are missing from the trace, because writing did not keep up."""

    @property
    def path(self) -> Path:
        """Where the trace is, once there are lines in it."""
        return self._writer.path

    def record(
        self,
        arrival: float,
        num_prompt: int,
        num_output: int,
        hashes: Sequence[bytes],
        ending: Hashable | None = None,
    ) -> None:
        """A request is over now. O(ids), and never waits for the file system.

        Args:
            arrival: when it came, by the clock.
            num_prompt: tokens of its prompt.
            num_output: tokens of its answer; a trace knows none without, so none counts as one.
            hashes: prefix hashes of at least all full blocks of its prompt.
            ending: how its answer ended; None: that is not known.
        """
        if self._writer.has_ended:
            return
        num_ids = num_prompt // IDS_BLOCK_TOKENS
        ends = hashes[self._stride - 1 : num_ids * self._stride : self._stride]
        if len(ends) < num_ids:
            return  # nothing the pool could have found: vLLM has not hashed all of it
        line = {
            "timestamp": max(0, round(1000 * (arrival - self._began))),
            "input_length": num_prompt,
            "output_length": max(1, num_output),
            "hash_ids": _ids_of(ends),
            "api_ms": max(0, round(1000 * (self._clock() - arrival))),
        }
        if ending is not None:
            line["stop"] = self._name_of(ending)
        self._lines.append((json.dumps(line) + "\n").encode())
        self._num_bytes += len(self._lines[-1])
        is_due = not 0 <= self._clock() - self._flushed < _FLUSH_SECONDS
        if is_due or self._num_bytes >= _FLUSH_BYTES:
            self.flush()

    def _name_of(self, ending: Hashable) -> str:
        """Equal for equal endings. It has no tokens, nor can they be found by trying."""
        return blake2b(repr(ending).encode(), key=self._key, digest_size=_NAME_BYTES).hexdigest()

    def flush(self) -> None:
        """Have written what has gathered. Does not wait for it."""
        self._flushed = self._clock()
        if not self._lines:
            return
        lines, self._lines, self._num_bytes = self._lines, [], 0
        if self._writer.append(b"".join(lines)) or self._writer.has_ended:
            return
        if not self.num_dropped:
            logger.warning(
                "%s is written too slowly: requests are missing from the trace from now on", self.path
            )
        self.num_dropped += len(lines)

    def wait(self, timeout: float) -> bool:
        """Wait until what was handed over is written; False if that takes more than ``timeout`` seconds."""
        return self._writer.wait(timeout)

    def close(self, timeout: float = CLOSE_SECONDS) -> None:
        """Write what there is, waiting for it ``timeout`` seconds at most. Nothing is recorded after that."""
        if self._writer.has_ended:
            return
        self.flush()
        if not self._writer.close(timeout):
            logger.warning(
                "%s is not written to its end: its file system did not answer in %g s", self.path, timeout
            )
        if self.num_dropped:
            logger.warning("%s lacks %d requests", self.path, self.num_dropped)

    def check_invariants(self) -> None:
        """What has gathered is counted and bounded."""
        self._writer.check_invariants()
        num_bytes = sum(map(len, self._lines))
        assert num_bytes == self._num_bytes, f"{num_bytes} bytes have gathered, {self._num_bytes} counted"
        assert num_bytes < _FLUSH_BYTES, f"{num_bytes} bytes have gathered"


def _ids_of(hashes: Sequence[bytes]) -> list[int]:
    """The first 63 bits of each hash; all are of one length, at least 8 bytes."""
    if not hashes:
        return []
    rows = np.frombuffer(b"".join(hashes), dtype=np.uint8).reshape(len(hashes), -1)
    ids: list[int] = (rows[:, :_ID_BYTES].copy().view(">u8")[:, 0] >> 1).tolist()
    return ids


def recorder_of(path: str | None, block_size: int) -> TraceRecorder | None:
    """Of the file that a configuration names, if it does."""
    return None if path is None else TraceRecorder(Path(path), block_size)
