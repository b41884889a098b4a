"""What a store keeps of an extent: a header that says what it is, and the bytes of its slots."""

import struct
from typing import NamedTuple

import numpy as np
import xxhash

from offload.worker.media.base import BadExtentError
from offload.worker.seals import Checksums

_HEAD = struct.Struct("<4sHHII32s32s")
"""Magic, version, slots, codec, bytes of a slot, digest of the namespace, name. Behind it come seals, and a
checksum."""
_MAGIC, _VERSION = b"KVOX", 2

NO_CODEC = 0
"""The codec of slots that are there as they were. There is no other yet."""

HEAD_BYTES = _HEAD.size
"""Of the part of a header that says how long the rest is."""


class ValueFormat(NamedTuple):
    """Of the values of one namespace and rank.

    Attributes:
        digest: of the namespace, with the rank; 32 bytes.
        slot_bytes: of one slot.
        extent_slots: slots of the largest extent.
    """

    digest: bytes
    slot_bytes: int
    extent_slots: int

    def header(self, name: bytes, seals: Checksums) -> bytes:
        """That of an extent with these slots."""
        head = _HEAD.pack(_MAGIC, _VERSION, len(seals), NO_CODEC, self.slot_bytes, self.digest, name)
        content = head + seals.astype("<u8").tobytes()
        return content + _checksum(content)

    @property
    def most_header_bytes(self) -> int:
        """Bytes of the longest header."""
        return _header_bytes(self.extent_slots)

    def count(self, length: int) -> int:
        """Slots of a value of so many bytes.

        Raises:
            BadExtentError: it is none of ours.
        """
        num_slots, rest = divmod(length - _header_bytes(0), 8 + self.slot_bytes)
        if rest or not 0 < num_slots <= self.extent_slots:
            raise BadExtentError(f"it has {length} bytes")
        return num_slots

    def seals(self, header: bytes, length: int, name: bytes) -> Checksums:
        """Those of a value of so many bytes, in its header.

        Raises:
            BadExtentError: it is not the extent of that name, or its header is not as it was written.
        """
        head = header[: _HEAD.size]
        end = _header_bytes(self.num_slots(head, length, name))
        return seals_in(head, header[_HEAD.size : end])

    def num_slots(self, head: bytes, length: int, name: bytes) -> int:
        """Slots of a value of so many bytes that begins like that.

        Raises:
            BadExtentError: it is not the extent of that name.
        """
        if len(head) < _HEAD.size:
            raise BadExtentError(f"it has {length} bytes")
        magic, version, num_slots, codec, slot_bytes, digest, its_name = _HEAD.unpack(head)
        if (magic, version) != (_MAGIC, _VERSION):
            raise BadExtentError(f"it is of format {magic!r} {version}")
        if codec != NO_CODEC:
            raise BadExtentError(f"its codec is {codec}, which is not known here")
        if digest != self.digest or its_name != name:
            raise BadExtentError("it is another extent, or of another namespace")
        is_ours = slot_bytes == self.slot_bytes and num_slots <= self.extent_slots
        if not is_ours or length != value_bytes(num_slots, slot_bytes):
            raise BadExtentError(f"{num_slots} slots of {slot_bytes} bytes in {length}")
        return int(num_slots)


def seals_in(head: bytes, rest: bytes) -> Checksums:
    """Those in the rest of a header.

    Raises:
        BadExtentError: the header is not as it was written.
    """
    if _checksum(head + rest[:-8]) != rest[-8:]:
        raise BadExtentError("the checksum of its header differs")
    return np.frombuffer(rest[:-8], dtype="<u8").astype(np.uint64)


def is_whole(value: bytes) -> bool:
    """Whether a value, of whomever, is as it was written."""
    if len(value) < _HEAD.size:
        return False
    magic, version, num_slots, codec, slot_bytes, _, _ = _HEAD.unpack_from(value)
    if (magic, version, codec) != (_MAGIC, _VERSION, NO_CODEC) or len(value) != value_bytes(
        num_slots, slot_bytes
    ):
        return False
    end = _header_bytes(num_slots)
    try:
        seals = seals_in(value[: _HEAD.size], value[_HEAD.size : end])
    except BadExtentError:
        return False
    slots = (value[end + slot_bytes * index : end + slot_bytes * (index + 1)] for index in range(num_slots))
    return all(
        xxhash.xxh3_64_intdigest(slot) == seal for slot, seal in zip(slots, seals.tolist(), strict=True)
    )


def value_bytes(num_slots: int, slot_bytes: int) -> int:
    """Bytes of a value of so many slots."""
    return _header_bytes(num_slots) + num_slots * slot_bytes


def _header_bytes(num_slots: int) -> int:
    return _HEAD.size + 8 * num_slots + 8


def _checksum(content: bytes) -> bytes:
    return xxhash.xxh3_64_intdigest(content).to_bytes(8, "little")
