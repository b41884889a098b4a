"""``kv-offload tier`` where it is given the address of a Mooncake Store."""

import argparse
import json
import re

from offload.errors import ConfigError, TierError
from offload.messages import PRIVATE
from offload.mooncake_config import MooncakeConfig
from offload.worker.media.mooncake import MooncakeClient, explained
from offload.worker.media.store_names import KEY_PREFIX, NAMESPACE

SCHEME = "mooncake://"

_ANY = "[0-9a-f]{16}"
_NAME = re.compile(_ANY)
_EXTENT = "[0-9a-f]{8}:[0-9a-f]{64}"
"""Of a key: the rank and the name. A suffix is behind it."""


def run_on_mooncake(verb: str, options: argparse.Namespace) -> int:
    """Carry out that verb; ``options.path`` is ``mooncake://`` and an address. Returns the exit status.

    Raises:
        TierError: the master cannot be had, or does not do that.
        ConfigError: it is no such address, or no name of a namespace.
    """
    config = MooncakeConfig(master_server_address=options.path.removeprefix(SCHEME).rstrip("/"))
    if verb not in ("drop", "gc"):
        host = config.master_server_address.rpartition(":")[0]
        raise TierError(
            f"clients of Mooncake cannot list what is there, so {verb} is not possible. The master can, on "
            f"its HTTP port: curl -s http://{host}:9003/get_all_keys | grep ^{KEY_PREFIX.decode()}"
        )
    try:
        client = MooncakeClient(config)
        found = [client.remove_matching(pattern) for pattern in _patterns(verb, options)]
        if verb == "drop":
            for name in options.names or [_ANY]:
                client.remove_matching(f"^{NAMESPACE.decode()}{name}$")
        bad = [each for each in found if each < 0]
        if bad:
            raise OSError(explained(bad[0]))
        client.close()
    except OSError as error:
        raise TierError(
            f"the store {config} does not answer: {error}; start it, or correct the URL"
        ) from error
    if options.json:
        print(json.dumps({"store": config.shown, "num_deleted": sum(found)}, indent=2))
    else:
        print(f"deleted  {sum(found):,} extents")
    return 0


def _patterns(verb: str, options: argparse.Namespace) -> list[str]:
    """Of the keys to delete."""
    prefix = KEY_PREFIX.decode()
    if verb == "gc":
        return [f"^{prefix}[0-9a-f]{{16}}:{_EXTENT}:{PRIVATE.hex()}"]
    for name in options.names:
        if not _NAME.fullmatch(name):
            raise ConfigError(
                f"{name!r} is no namespace; give 16 digits, as kv-offload status and the keys have them"
            )
    return [f"^{prefix}{name}:{_EXTENT}" for name in options.names or [_ANY]]
