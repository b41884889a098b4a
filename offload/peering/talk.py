"""How two sides come to know that both are of the fleet, whatever carries what they say."""

import hmac
import secrets
from collections.abc import Generator, Sequence
from typing import Any, TypeVar

from offload.peering.frames import (
    HANDSHAKE_BYTES,
    HEAD_BYTES,
    MOST_FRAME_BYTES,
    NONCE_BYTES,
    VERSION,
    Begin,
    Challenge,
    Message,
    Proof,
    Refused,
    check,
    decoded,
    decoder,
    framed,
    length_of,
)

Buffer = bytes | memoryview
Of = TypeVar("Of")
Talk = Generator[memoryview | Sequence[Buffer], None, Of]
"""One side of a conversation, whatever carries it. It yields memory that is to be filled with what comes
next, whole, or pieces that are to be sent, whole, and goes on when that is done. No pieces at all: others
may have their turn before it goes on."""

_BEGIN, _PROOF = decoder(Begin), decoder(Proof)
_CHALLENGED, _PROVED = decoder(Challenge, Refused), decoder(Proof, Refused)
_CALLER, _CALLED = b"kv-offload peer 1: who calls\0", b"kv-offload peer 1: who is called\0"
_WRONG_KEY = "the fleet's key is another one; give all engines of the fleet the same fleet_key_file"


class RefusedError(OSError):
    """A peer will not have to do with this engine, or the other way round. The text says why."""


def say(message: Message) -> Talk[None]:
    """Send that."""
    yield [framed(message)]


def hear(of: Any, most: int = MOST_FRAME_BYTES) -> Talk[Any]:
    """Wait for a message that ``of`` decodes, of so many bytes at most. Raises ProtocolError."""
    head = bytearray(HEAD_BYTES)
    yield memoryview(head)
    content = bytearray(length_of(head, most))
    yield memoryview(content)
    check(head, content)
    return decoded(content, of)


def prove_as_caller(key: bytes) -> Talk[None]:
    """Say who calls, and make sure who was called.

    Raises:
        RefusedError: it has another key, or speaks another version.
        ProtocolError: that is no peer.
    """
    nonce = secrets.token_bytes(NONCE_BYTES)
    yield from say(Begin(VERSION, nonce))
    challenge = unless_refused((yield from hear(_CHALLENGED, HANDSHAKE_BYTES)))
    if challenge.version != VERSION:
        raise RefusedError(f"it speaks version {challenge.version} of the protocol, and this is {VERSION}")
    nonces = nonce + challenge.nonce
    yield from say(Proof(_proof(key, _CALLER, nonces)))
    proof = unless_refused((yield from hear(_PROVED, HANDSHAKE_BYTES)))
    if not hmac.compare_digest(proof.proof, _proof(key, _CALLED, nonces)):
        raise RefusedError(_WRONG_KEY)


def prove_as_called(key: bytes) -> Talk[None]:
    """Make sure who calls. Raises as ``prove_as_caller``; whoever calls has been told why."""
    begin: Begin = yield from hear(_BEGIN, HANDSHAKE_BYTES)
    nonce = secrets.token_bytes(NONCE_BYTES)
    yield from say(Challenge(VERSION, nonce))
    if begin.version != VERSION:
        raise RefusedError(f"version {begin.version} of the protocol")
    nonces = begin.nonce + nonce
    proof: Proof = yield from hear(_PROOF, HANDSHAKE_BYTES)
    if not hmac.compare_digest(proof.proof, _proof(key, _CALLER, nonces)):
        yield from say(Refused(_WRONG_KEY))
        raise RefusedError(_WRONG_KEY)
    yield from say(Proof(_proof(key, _CALLED, nonces)))


def unless_refused(message: Any) -> Any:
    """The message, if questions may be asked. Raises RefusedError."""
    if isinstance(message, Refused):
        raise RefusedError(message.reason)
    return message


def _proof(key: bytes, who: bytes, nonces: bytes) -> bytes:
    return hmac.digest(key, who + nonces, "sha256")
