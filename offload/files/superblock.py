"""Whose bytes a directory holds, and how often it was opened."""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import xxhash

from offload.errors import TierError, TierFormatError
from offload.files.private import PrivateDirectory

SUPERBLOCK = "superblock"
FORMAT = 3
"""Of all files of a tier's directory."""

_MAGIC = b"kv-offload tier"


@dataclass(frozen=True, slots=True)
class Superblock:
    """What a tier's directory says about itself.

    Attributes:
        namespace: all that must be equal for its bytes to be usable, in clear.
        sizes: numbers of which the same is true, in bytes and slots, by name.
        epoch: how often it was opened; part of every generation that is written there.
    """

    namespace: str
    sizes: Mapping[str, int]
    epoch: int


class Readable(Protocol):
    """A directory, owned or not."""

    @property
    def path(self) -> Path:
        """The directory."""

    def read(self, name: str) -> bytes | None:
        """All of a file; None if it is not there. Raises TierError."""


def read_superblock(directory: Readable) -> Superblock | None:
    """What it says; None if there is none.

    Raises:
        TierFormatError: it is of a format that is not read, or damaged.
        TierError: it cannot be read.
    """
    content = directory.read(SUPERBLOCK)
    if content is None:
        return None
    path = directory.path / SUPERBLOCK
    head, _, rest = content.partition(b"\n")
    magic, _, version = head.rpartition(b" ")
    if magic == _MAGIC and version.isdigit() and int(version) != FORMAT:
        raise TierFormatError(
            f"{path}: its format is {int(version)}, and this release reads {FORMAT}; "
            f"delete {directory.path}, or choose another path"
        )
    body, _, seal = rest.rstrip(b"\n").rpartition(b"\n")
    damaged = f"{path}: it is damaged; delete {directory.path}, it holds nothing but cached KV"
    if magic != _MAGIC or seal != _seal(body):
        raise TierFormatError(damaged)
    try:
        return Superblock(**json.loads(body))
    except (ValueError, TypeError) as error:
        raise TierFormatError(damaged) from error


def age_of(directory: Readable) -> float:
    """Seconds since that of a directory was written, 0 if the clock was set back. Raises OSError."""
    return max(0.0, time.time() - (directory.path / SUPERBLOCK).stat().st_mtime)


def write_superblock(directory: PrivateDirectory, superblock: Superblock) -> None:
    """Let it say that, whole or not at all. Raises TierError."""
    fields = {
        "namespace": superblock.namespace,
        "sizes": dict(superblock.sizes),
        "epoch": superblock.epoch,
    }
    body = json.dumps(fields).encode()
    head = b"%s %d" % (_MAGIC, FORMAT)
    directory.replace(SUPERBLOCK, b"\n".join((head, body, _seal(body), b"")))


def check_same(
    directory: PrivateDirectory, found: Superblock, namespace: str, sizes: Mapping[str, int]
) -> None:
    """Refuse a directory whose bytes are of another namespace or of other sizes.

    Raises:
        TierError: it is; the message names what differs.
    """
    if found.namespace != namespace:
        raise TierError(
            f"{directory.path}: its KV is of the namespace {found.namespace!r}, not of {namespace!r}; "
            f"choose another path, or delete it"
        )
    if dict(found.sizes) != dict(sizes):
        raise TierError(
            f"{directory.path}: its sizes are {dict(found.sizes)}, not {dict(sizes)}; "
            f"choose another path, or delete it"
        )


def _seal(body: bytes) -> bytes:
    return xxhash.xxh3_64_hexdigest(body).encode()
