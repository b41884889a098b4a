"""How two peers come to know that both are of the fleet, and that one's KV is of use to the other."""

import hashlib
import hmac
import json
import secrets
from typing import Any

from offload.worker.peers.link import Talk
from offload.worker.peers.protocol import (
    HANDSHAKE_BYTES,
    LENGTH_BYTES,
    MOST_FRAME_BYTES,
    NONCE_BYTES,
    VERSION,
    About,
    Begin,
    Challenge,
    Message,
    Proof,
    Refused,
    Welcome,
    decoded,
    decoder,
    framed,
    length_of,
)

_DIGEST_BYTES = 16
_BEGIN, _PROOF, _ABOUT = decoder(Begin), decoder(Proof), decoder(About)
_CHALLENGED, _PROVED = decoder(Challenge, Refused), decoder(Proof, Refused)
_WELCOMED = decoder(Welcome, Refused)
_CALLER, _CALLED = b"kv-offload peer 1: who calls\0", b"kv-offload peer 1: who is called\0"
_WRONG_KEY = "the fleet's key is another one; give all engines of the fleet the same fleet_key_file"


class RefusedError(OSError):
    """A peer will not have to do with this engine, or the other way round. The text says why."""


def say(message: Message) -> Talk[None]:
    """Send that."""
    yield [framed(message)]


def hear(of: Any, most: int = MOST_FRAME_BYTES) -> Talk[Any]:
    """Wait for a message that ``of`` decodes, of so many bytes at most. Raises ProtocolError."""
    head = bytearray(LENGTH_BYTES)
    yield memoryview(head)
    content = bytearray(length_of(head, most))
    yield memoryview(content)
    return decoded(content, of)


def describe_namespace(namespace: str) -> dict[str, bytes]:
    """Digests of all that must be equal, by what it is: of the text of a namespace, an object in JSON."""
    try:
        things = json.loads(namespace)
    except ValueError:
        things = None
    if not isinstance(things, dict):
        things = {"namespace": namespace}
    return {str(name): _digest(json.dumps(value, sort_keys=True)) for name, value in things.items()}


def describe_machine(machine: str) -> bytes:
    """A digest of which machine this is, as ``offload.worker.pool.segment`` says it."""
    return _digest(machine)


def reason_against(own: About, other: About) -> str | None:
    """Why KV of these two is of no use to each other; None if it is."""
    names = sorted({*own.namespace, *other.namespace})
    differing = [name for name in names if own.namespace.get(name) != other.namespace.get(name)]
    if differing:
        return f"KV of other {', '.join(differing)}"[:300]
    if (own.rank, own.world_size) != (other.rank, other.world_size):
        return f"rank {other.rank} of {other.world_size}, where {own.rank} of {own.world_size} is needed"
    if (own.part, own.num_parts) != (other.part, other.num_parts):
        return (
            f"part {other.part} of {other.num_parts} of a pool that ranks share, where {own.part} of "
            f"{own.num_parts} is needed"
        )
    if (own.slot_bytes, own.columns) != (other.slot_bytes, other.columns):
        return (
            f"slots of {other.slot_bytes:,} bytes, {other.columns} a position, where they have "
            f"{own.slot_bytes:,}, {own.columns} a position"
        )
    return None


def call(key: bytes, about: About) -> Talk[Welcome]:
    """Say who calls, and make sure who was called.

    Raises:
        RefusedError: one of the two has a reason.
        ProtocolError: that is no peer.
    """
    nonce = secrets.token_bytes(NONCE_BYTES)
    yield from say(Begin(VERSION, nonce))
    challenge = _unless_refused((yield from hear(_CHALLENGED, HANDSHAKE_BYTES)))
    if challenge.version != VERSION:
        raise RefusedError(f"it speaks version {challenge.version} of the protocol, and this is {VERSION}")
    nonces = nonce + challenge.nonce
    yield from say(Proof(_proof(key, _CALLER, nonces)))
    proof = _unless_refused((yield from hear(_PROVED, HANDSHAKE_BYTES)))
    if not hmac.compare_digest(proof.proof, _proof(key, _CALLED, nonces)):
        raise RefusedError(_WRONG_KEY)
    yield from say(about)
    welcome: Welcome = _unless_refused((yield from hear(_WELCOMED, HANDSHAKE_BYTES)))
    if (reason := reason_against(about, welcome.about)) is not None:
        raise RefusedError(f"it has {reason}")
    return welcome


def answer(key: bytes, own: About) -> Talk[About]:
    """Make sure who calls. ``Welcome`` is yet to be said, or ``Refused``.

    Raises:
        RefusedError: it has been told why.
        ProtocolError: that is no peer.
    """
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
    about: About = yield from hear(_ABOUT, HANDSHAKE_BYTES)
    if (reason := reason_against(own, about)) is not None:
        yield from say(Refused(f"it has {reason_against(about, own)}"))
        raise RefusedError(f"it has {reason}")
    return about


def _unless_refused(message: Any) -> Any:
    if isinstance(message, Refused):
        raise RefusedError(message.reason)
    return message


def _proof(key: bytes, who: bytes, nonces: bytes) -> bytes:
    return hmac.digest(key, who + nonces, "sha256")


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()[:_DIGEST_BYTES]
