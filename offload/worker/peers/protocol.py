"""What peers say to each other: messages of bounded size, each behind its length.

A connection begins with a handshake (``handshake.py``). Then one side asks and the other answers, one
question after the other. What follows a ``Rows`` are the bytes of slots, as they lie in the pool, and then an
``Over``. Numbers of many slots are arrays in bytes, lowest byte first. Nothing is pickled.
"""

from typing import Annotated

import numpy as np
from msgspec import Meta, Struct

from offload.messages import NAME_BYTES, SUFFIX_BYTES, Ids, Names
from offload.peering.frames import Large, Message, ProtocolError, Small
from offload.worker.seals import Checksums

MOST_NAMES = 8192
"""In one ``Probe``: as many as the scheduler's side asks about at once."""
MOST_EXTENTS = 1024
MOST_SLOTS = 16_384
"""In one ``Get``."""
MOST_METADATA_BYTES = 64 << 10
"""Of an agent of NIXL."""
LEAST_BYTES_PER_SECOND = 4 << 20
"""A peer that is slower is given up: what it sends would take longer than it is worth waiting for."""
EPOCH_BYTES = PEER_BYTES = 8


Digest = Annotated[bytes, Meta(max_length=32)]
Suffix = Annotated[bytes, Meta(max_length=SUFFIX_BYTES)]
Count = Annotated[int, Meta(ge=1, le=MOST_SLOTS)]


class About(Message, tag=3, array_like=True, frozen=True):
    """What must be equal on both sides.

    Attributes:
        namespace: what makes KV usable, each thing as a digest.
        rank: of the engine.
        world_size: its ranks.
        part: of the replica set's bytes that is this rank's.
        num_parts: members of it.
        slot_bytes: of a slot.
        columns: slots of a position.
        machine: a digest of which machine it is, for whoever may share memory.
        peer: the engine; none of one that does not listen.
    """

    namespace: Annotated[dict[Annotated[str, Meta(max_length=40)], Digest], Meta(max_length=32)]
    rank: Small
    world_size: Small
    part: Small
    num_parts: Small
    slot_bytes: Large
    columns: Small
    machine: Digest = b""
    peer: Annotated[bytes, Meta(max_length=PEER_BYTES)] = b""


class Memory(Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """Where whoever is on the same machine finds slots, and behind them seals: see ``SegmentName``."""

    pid: Large
    fd: Small
    label: Annotated[str, Meta(max_length=80)]
    nbytes: Large
    num_slots: Large


class Welcome(Message, tag=4, array_like=True, frozen=True):
    """Questions may be asked.

    Attributes:
        about: of whoever was called.
        epoch: its life.
        suffix: what it has is behind that; nothing if nobody may know it.
        memory: of the pool, for whoever is on the same machine.
    """

    about: About
    epoch: Annotated[bytes, Meta(min_length=EPOCH_BYTES, max_length=EPOCH_BYTES)]
    suffix: Suffix
    memory: Memory | None = None


class Ping(Message, tag=6, array_like=True, frozen=True):
    """Are you there?"""


class Probe(Message, tag=7, array_like=True, frozen=True):
    """Are these names there?

    Attributes:
        names: 32 bytes each.
        suffix: behind them.
        is_last_wanted: what is asked is which the last is that is there, not how many leading ones are.
    """

    names: Annotated[bytes, Meta(max_length=MOST_NAMES * NAME_BYTES)]
    suffix: Suffix
    is_last_wanted: bool


class Get(Message, tag=8, array_like=True, frozen=True):
    """Give me these extents, up to the first that is not there.

    Attributes:
        names: 32 bytes each.
        suffix: behind them.
        counts: slots of each.
        skips: leading slots of each that are left out.
        is_near: only say where they lie: whoever asks reads them itself.
    """

    names: Annotated[bytes, Meta(max_length=MOST_EXTENTS * NAME_BYTES)]
    suffix: Suffix
    counts: Annotated[list[Count], Meta(max_length=MOST_EXTENTS)]
    skips: Annotated[list[Small], Meta(max_length=MOST_EXTENTS)]
    is_near: bool


class Release(Message, tag=9, array_like=True, frozen=True):
    """What is leased of the chain that ends there is not needed any more."""

    tip: Annotated[bytes, Meta(min_length=NAME_BYTES, max_length=NAME_BYTES)]
    epoch: Annotated[bytes, Meta(min_length=EPOCH_BYTES, max_length=EPOCH_BYTES)]


class Reach(Message, tag=13, array_like=True, frozen=True):
    """Where is your pool, for one who reads it by NIXL?"""


class Check(Message, tag=15, array_like=True, frozen=True):
    """Do these slots still hold what you have said of them, in that life?

    Attributes:
        epoch: the life.
        slots: ``int64[n]``.
        generations: the same.
    """

    epoch: Annotated[bytes, Meta(min_length=EPOCH_BYTES, max_length=EPOCH_BYTES)]
    slots: Annotated[bytes, Meta(max_length=8 * MOST_SLOTS)]
    generations: Annotated[bytes, Meta(max_length=8 * MOST_SLOTS)]


class Told(Message, tag=10, array_like=True, frozen=True):
    """The answer to what asks for no slots.

    Attributes:
        epoch: this life.
        suffix: as ``Welcome``.
        num_found: of a ``Probe``: leading names that are there, or those up to the last that is.
        is_refused: the prompt that ends with its last name is not handed off: no more is to be waited for.
    """

    epoch: Annotated[bytes, Meta(min_length=EPOCH_BYTES, max_length=EPOCH_BYTES)]
    suffix: Suffix
    num_found: Small = 0
    is_refused: bool = False


class Rows(Message, tag=11, array_like=True, frozen=True):
    """The beginning of the answer to a ``Get``.

    Attributes:
        epoch: this life.
        suffix: as ``Welcome``.
        num_extents: leading ones that are there.
        sums: checksums of their slots, ``uint64[n]``.
        slots: where they lie, ``int64[n]``, if that was asked: then no bytes follow, and no ``Over``.
        generations: the same of what they hold.
    """

    epoch: Annotated[bytes, Meta(min_length=EPOCH_BYTES, max_length=EPOCH_BYTES)]
    suffix: Suffix
    num_extents: Small
    sums: Annotated[bytes, Meta(max_length=8 * MOST_SLOTS)]
    slots: Annotated[bytes, Meta(max_length=8 * MOST_SLOTS)] = b""
    generations: Annotated[bytes, Meta(max_length=8 * MOST_SLOTS)] = b""


class Over(Message, tag=12, array_like=True, frozen=True):
    """All bytes were sent. The slots of so many leading extents have not changed meanwhile."""

    num_extents: Small


class Reachable(Message, tag=14, array_like=True, frozen=True):
    """The answer to a ``Reach``; without metadata, nobody reads it by NIXL.

    Attributes:
        agent: the name of its agent.
        metadata: of it, as the library has it.
        address: of the first slot, in the memory of its owner.
        num_slots: one after the other.
    """

    agent: Annotated[str, Meta(max_length=64)] = ""
    metadata: Annotated[bytes, Meta(max_length=MOST_METADATA_BYTES)] = b""
    address: Large = 0
    num_slots: Large = 0


class Unchanged(Message, tag=16, array_like=True, frozen=True):
    """The answer to a ``Check``: so many leading slots do."""

    num_slots: Small


Question = Ping | Probe | Get | Release | Reach | Check


def names_in(content: bytes) -> Names:
    """``uint8[n, 32]``. Raises ProtocolError."""
    if len(content) % NAME_BYTES:
        raise ProtocolError(f"names of {len(content)} bytes")
    return np.frombuffer(content, dtype=np.uint8).reshape(-1, NAME_BYTES)


def sums_in(content: bytes, count: int) -> Checksums:
    """``uint64[count]``. Raises ProtocolError."""
    _check(content, count)
    return np.frombuffer(content, dtype="<u8").astype(np.uint64)


def ids_in(content: bytes, count: int) -> Ids:
    """``int64[count]``. Raises ProtocolError."""
    _check(content, count)
    return np.frombuffer(content, dtype="<i8").astype(np.int64)


_MOST_UNEVEN = 8
"""All extents of a question are looked up side by side, as deep as the longest."""


def check_get(get: Get) -> int:
    """Refuse a question that does not add up, or asks for too much. How many extents it has."""
    if not len(get.names) == NAME_BYTES * len(get.counts) == NAME_BYTES * len(get.skips):
        raise ProtocolError(f"{len(get.names)} bytes of names of {len(get.counts)} extents")
    if sum(get.counts) > MOST_SLOTS or max(get.skips, default=0) > MOST_SLOTS:
        raise ProtocolError(f"{sum(get.counts)} slots in one question")
    if max(get.counts, default=0) * len(get.counts) > _MOST_UNEVEN * MOST_SLOTS:
        raise ProtocolError(f"an extent of {max(get.counts)} slots beside {len(get.counts) - 1} others")
    return len(get.counts)


def in_bytes(values: "Ids | Checksums | Names") -> bytes:
    """An array as it is sent."""
    return np.ascontiguousarray(values).tobytes()


def _check(content: bytes, count: int) -> None:
    if len(content) != 8 * count:
        raise ProtocolError(f"{len(content)} bytes of numbers of {count} slots")
