"""Whether a store can be had, and keeps what is written: asked before an engine starts."""

import os
import time
from typing import NamedTuple

from offload.errors import TierError
from offload.store_config import StoreConfig
from offload.worker.media.resp import Connection, StoreError
from offload.worker.media.store_names import KEY_PREFIX

_TRIED_BYTES = 1 << 20
_TRIED_MS = b"10000"


class StoreGoneError(TierError):
    """Nobody listens there, or not in time. It may come back."""


class StoreProbe(NamedTuple):
    """What a store has to offer.

    Attributes:
        seconds: of one question.
        policy: what it evicts when it is full; empty: it does not tell us.
    """

    seconds: float
    policy: str


def probe_store(tier: StoreConfig) -> StoreProbe:
    """Write a MiB, read it back, and delete it.

    Raises:
        StoreGoneError: nobody listens there, or not in time.
        TierError: it refuses us, or does not give back what was written.
        ConfigError: a file of the configuration cannot be read.
    """
    name_key, address = tier.name_key, tier.address
    key, content = KEY_PREFIX + b"probe:" + os.urandom(8).hex().encode(), os.urandom(_TRIED_BYTES)
    del name_key  # that it can be read is all that is asked
    try:
        connection = Connection(address, ca_file=tier.ca_file)
        try:
            began = time.monotonic()
            connection.call(b"EXISTS", key)
            seconds = time.monotonic() - began
            connection.call(b"SET", key, content, b"NX", b"PX", _TRIED_MS)
            is_same = connection.call(b"GETEX", key, b"PX", _TRIED_MS) == content
            is_prolonged = connection.call(b"PEXPIRE", key, _TRIED_MS) == 1
            connection.call(b"DEL", key)
            policy = _policy(connection)
        finally:
            connection.close()
    except StoreError as error:
        raise TierError(
            f"the store {tier} refuses us: {str(error).rstrip('.')}. Look at user, password and database "
            f"in url, and give a user of an access control list what docs/using.md says"
        ) from error
    except OSError as error:
        raise StoreGoneError(
            f"the store {tier} does not answer: {error}. Start it, or correct url, or remove the tier"
        ) from error
    if not (is_same and is_prolonged):
        raise TierError(
            f"the store {tier} has not given back a MiB that was written a moment before; look at its "
            f"maxmemory, and whether the url is that of a replica"
        )
    return StoreProbe(seconds, policy)


def _policy(connection: Connection) -> str:
    """What it evicts when it is full; empty: it does not tell us."""
    try:
        found = connection.call(b"CONFIG", b"GET", b"maxmemory-policy")
    except StoreError:
        return ""
    policy = found[1] if isinstance(found, list) and len(found) == 2 else b""
    return policy.decode() if isinstance(policy, bytes) else ""
