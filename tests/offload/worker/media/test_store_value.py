"""What a store keeps of an extent says how it is read; what says anything else is refused."""

import struct

import numpy as np
import pytest
import xxhash

from offload.worker.media.base import BadExtentError
from offload.worker.media.store_value import HEAD_BYTES, NO_CODEC, ValueFormat, is_whole, value_bytes

SLOT = 24
NAME, DIGEST = b"n" * 32, b"d" * 32
FORMAT = ValueFormat(DIGEST, SLOT, 4)
SLOTS = [b"0" * SLOT, b"1" * SLOT, b"2" * SLOT]
SEALS = np.array([xxhash.xxh3_64_intdigest(slot) for slot in SLOTS], dtype=np.uint64)
VALUE = FORMAT.header(NAME, SEALS) + b"".join(SLOTS)
HEADER_BYTES = len(VALUE) - len(SLOTS) * SLOT


def changed(at: int, field: bytes) -> bytes:
    """The value of a writer that had this there: its header's checksum is right."""
    content = VALUE[:at] + field + VALUE[at + len(field) : HEADER_BYTES - 8]
    checksum = xxhash.xxh3_64_intdigest(content).to_bytes(8, "little")
    return content + checksum + VALUE[HEADER_BYTES:]


def test_it_is_read_as_it_was_written() -> None:
    assert len(VALUE) == value_bytes(len(SLOTS), SLOT)
    assert FORMAT.count(len(VALUE)) == len(SLOTS)
    assert np.array_equal(FORMAT.seals(VALUE[:HEADER_BYTES], len(VALUE), NAME), SEALS)
    assert is_whole(VALUE)
    assert changed(8, struct.pack("<I", NO_CODEC)) == VALUE


@pytest.mark.parametrize(
    ("at", "field", "why"),
    [
        (8, struct.pack("<I", 1), "codec is 1"),
        (8, struct.pack("<I", 1 << 31), "codec is 2147483648"),
        (4, struct.pack("<H", 1), "format b'KVOX' 1"),
        (4, struct.pack("<H", 3), "format b'KVOX' 3"),
        (0, b"KVOY", "format b'KVOY' 2"),
        (6, struct.pack("<H", 2), "2 slots of 24 bytes"),
        (12, struct.pack("<I", SLOT + 1), "3 slots of 25 bytes"),
    ],
    ids=["codec", "high codec", "older", "newer", "magic", "slots", "slot bytes"],
)
def test_whatever_says_something_else_is_refused(at: int, field: bytes, why: str) -> None:
    """Also where nothing is damaged: bytes of a codec would be taken for KV."""
    value = changed(at, field)
    with pytest.raises(BadExtentError, match=why):
        FORMAT.seals(value[:HEADER_BYTES], len(value), NAME)
    with pytest.raises(BadExtentError, match=why):
        FORMAT.num_slots(value[:HEAD_BYTES], len(value), NAME)
    assert not is_whole(value)


@pytest.mark.parametrize("at", range(HEADER_BYTES))
def test_a_byte_of_the_header_that_has_changed(at: int) -> None:
    value = VALUE[:at] + bytes([VALUE[at] ^ 1]) + VALUE[at + 1 :]
    with pytest.raises(BadExtentError):
        FORMAT.seals(value[:HEADER_BYTES], len(value), NAME)
