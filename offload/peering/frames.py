"""Messages of bounded size, each behind its length and a checksum: for all who talk to an engine of a fleet.

This imports neither torch nor vLLM, so that whoever only asks can do without them. Nothing is pickled.
"""

import struct
from typing import Annotated, Any, TypeVar

import msgspec
import xxhash
from msgspec import Meta, Struct

VERSION = 2
MOST_FRAME_BYTES = 1 << 20
"""Of a message. Bytes of slots are not in one."""
HANDSHAKE_BYTES = 4096
"""The same before both sides know each other."""
NONCE_BYTES = PROOF_BYTES = 32

_HEAD = struct.Struct("<IQ")
HEAD_BYTES = _HEAD.size
"""Before a message: its length, and xxh3-64 of it."""


class ProtocolError(OSError):
    """What came is not of the protocol. The connection is of no use any more."""


Text = Annotated[str, Meta(max_length=500)]
Small = Annotated[int, Meta(ge=0, le=1 << 20)]
Large = Annotated[int, Meta(ge=0, le=(1 << 62))]
Of = TypeVar("Of")


class Message(Struct, array_like=True, frozen=True, forbid_unknown_fields=True):
    """One of them."""


class Begin(Message, tag=0, array_like=True, frozen=True):
    """The first word of whoever has called.

    Attributes:
        version: of the protocol.
        nonce: random.
    """

    version: Small
    nonce: Annotated[bytes, Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]


class Challenge(Message, tag=1, array_like=True, frozen=True):
    """The first word of whoever was called; the same of the other."""

    version: Small
    nonce: Annotated[bytes, Meta(min_length=NONCE_BYTES, max_length=NONCE_BYTES)]


class Proof(Message, tag=2, array_like=True, frozen=True):
    """Whoever says it has the fleet's key."""

    proof: Annotated[bytes, Meta(min_length=PROOF_BYTES, max_length=PROOF_BYTES)]


class Refused(Message, tag=5, array_like=True, frozen=True):
    """Nothing will be answered, for this reason."""

    reason: Text


def framed(message: Message) -> bytes:
    """A message as it is sent."""
    content = msgspec.msgpack.encode(message)
    assert len(content) <= MOST_FRAME_BYTES, f"{type(message).__name__} of {len(content)} bytes"
    return sealed(content)


def sealed(content: bytes) -> bytes:
    """Behind its head."""
    return _HEAD.pack(len(content), xxhash.xxh3_64_intdigest(content)) + content


def length_of(head: bytes | bytearray, most: int = MOST_FRAME_BYTES) -> int:
    """Bytes of the message behind its head. Raises ProtocolError: too many."""
    length, _ = _HEAD.unpack(head)
    if not 0 < length <= most:
        raise ProtocolError(f"a message of {length} bytes: it may have {most}")
    return int(length)


def check(head: bytes | bytearray, content: bytes | bytearray) -> None:
    """Refuse a message that has changed on its way: slots of another extent have right seals, too."""
    _, checksum = _HEAD.unpack(head)
    if xxhash.xxh3_64_intdigest(content) != checksum:
        raise ProtocolError("a message has changed on its way")


def decoder(*kinds: Any) -> "msgspec.msgpack.Decoder[Any]":
    """Of messages of these kinds."""
    union: Any = kinds[0]
    for kind in kinds[1:]:
        union = union | kind
    return msgspec.msgpack.Decoder(union)


def decoded(content: bytes | bytearray, by: "msgspec.msgpack.Decoder[Of]") -> Of:
    """What that is. Raises ProtocolError: none of the messages that may come."""
    try:
        return by.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ProtocolError(f"no message that may come: {error}") from error
