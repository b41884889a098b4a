"""Records live traffic as a trace: hashes and lengths of finished requests, never tokens.

The format is that of ``trace``. An id stands for 512 tokens and all before them: the engine's own prefix hash
at that position, cut to 63 bits. Whether equal prompts have equal hashes in another run is for vLLM to say:
with its sha256 algorithms they have, with xxhash only if ``PYTHONHASHSEED`` is set.
"""

import errno
import json
import logging
import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import chain, count
from pathlib import Path

import numpy as np

from offload.errors import ConfigError
from offload.trace import IDS_BLOCK_TOKENS

logger = logging.getLogger(__name__)

_FLUSH_SECONDS = 5.0
_ID_BYTES = 8


def check_divides(block_size: int) -> None:
    """Refuse blocks that do not end where the ids of a trace do.

    Raises:
        ConfigError: ``block_size`` tokens do not divide ``IDS_BLOCK_TOKENS``.
    """
    if IDS_BLOCK_TOKENS % block_size:
        raise ConfigError(
            f"record_trace is set and the block size is {block_size}, which does not divide the "
            f"{IDS_BLOCK_TOKENS} tokens of an id in a trace; use --block-size 16, or remove record_trace"
        )


class TraceRecorder:
    """Writes a line per request to a file that is new: an existing one is left alone, see ``path``.

    Lines are kept and written together every few seconds, whole lines only. A fault in writing ends the
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
        self.path = path
        """Where the trace is, once there are lines in it."""
        self._stride = IDS_BLOCK_TOKENS // block_size
        self._clock = clock
        self._began = self._flushed = clock()
        self._lines: list[str] = []
        self._is_open = False
        self._is_broken = False

    def record(self, arrival: float, num_prompt: int, num_output: int, hashes: Sequence[bytes]) -> None:
        """A request is over. O(ids), and every few seconds a write of what has gathered.

        Args:
            arrival: when it came, by the clock.
            num_prompt: tokens of its prompt.
            num_output: tokens of its answer; a trace knows none without, so none counts as one.
            hashes: prefix hashes of at least all full blocks of its prompt.
        """
        if self._is_broken:
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
        }
        self._lines.append(json.dumps(line) + "\n")
        if not 0 <= self._clock() - self._flushed < _FLUSH_SECONDS:
            self.flush()

    def flush(self) -> None:
        """Write what has gathered."""
        self._flushed = self._clock()
        if not self._lines or self._is_broken:
            return
        lines, self._lines = self._lines, []
        try:
            if not self._is_open:
                asked_for, self.path = self.path, _make(self.path)
                self._is_open = True
                level = logging.INFO if self.path == asked_for else logging.WARNING
                logger.log(level, "recording a trace of finished requests in %s", self.path)
            _append(self.path, "".join(lines).encode())
        except (OSError, ValueError) as error:
            self._is_broken = True
            logger.warning("recording the trace %s has ended, it cannot be written: %s", self.path, error)

    def check_invariants(self) -> None:
        """What cannot be written is not kept."""
        assert not (self._is_broken and self._lines), f"{len(self._lines)} lines wait for a broken file"


def _ids_of(hashes: Sequence[bytes]) -> list[int]:
    """The first 63 bits of each hash; all are of one length, at least 8 bytes."""
    if not hashes:
        return []
    rows = np.frombuffer(b"".join(hashes), dtype=np.uint8).reshape(len(hashes), -1)
    ids: list[int] = (rows[:, :_ID_BYTES].copy().view(">u8")[:, 0] >> 1).tolist()
    return ids


def _make(path: Path) -> Path:
    """Make an empty file at ``path``, or beside it if something is there."""
    beside = (path.with_suffix(f".{number}{path.suffix}") for number in count(2))
    for name in chain([path], beside):
        with suppress(FileExistsError):
            name.open("xb").close()
            break
    return name


def _append(path: Path, content: bytes) -> None:
    """Append all of ``content`` to a file that is there, or nothing."""
    with path.open("r+b", buffering=0) as file:
        end = file.seek(0, os.SEEK_END)
        written = 0
        try:
            while written < len(content):
                num = file.write(content[written:])
                if not num:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                written += num
        except OSError:
            with suppress(OSError):
                file.truncate(end)
            raise
