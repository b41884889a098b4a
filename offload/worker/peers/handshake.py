"""How two peers come to know that both are of the fleet, and that one's KV is of use to the other."""

import hashlib
import json

from offload.peering.frames import HANDSHAKE_BYTES, Refused, decoder
from offload.peering.locating import Asks
from offload.peering.talk import (
    RefusedError,
    Talk,
    hear,
    prove_as_called,
    prove_as_caller,
    say,
    unless_refused,
)
from offload.worker.peers.protocol import About, Welcome

_DIGEST_BYTES = 16
_WHO = decoder(About, Asks)
_WELCOMED = decoder(Welcome, Refused)


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
    yield from prove_as_caller(key)
    yield from say(about)
    welcome: Welcome = unless_refused((yield from hear(_WELCOMED, HANDSHAKE_BYTES)))
    if (reason := reason_against(about, welcome.about)) is not None:
        raise RefusedError(f"it has {reason}")
    return welcome


def answer(key: bytes, own: About) -> Talk[About | Asks]:
    """Make sure who calls. ``Welcome`` is yet to be said, or ``Heard`` to one who only asks, or ``Refused``.

    Raises:
        RefusedError: it has been told why.
        ProtocolError: that is no peer.
    """
    yield from prove_as_called(key)
    about: About | Asks = yield from hear(_WHO, HANDSHAKE_BYTES)
    if isinstance(about, Asks):
        return about
    if (reason := reason_against(own, about)) is not None:
        yield from say(Refused(f"it has {reason_against(about, own)}"))
        raise RefusedError(f"it has {reason}")
    return about


def _digest(text: str) -> bytes:
    return hashlib.sha256(text.encode()).digest()[:_DIGEST_BYTES]
