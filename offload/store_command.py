"""``kv-offload tier`` where it is given the URL of a store."""

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from offload.errors import TierError
from offload.settings import GIB
from offload.sizing.tables import format_table
from offload.store_config import StoreConfig
from offload.worker.media.resp import Connection, StoreError
from offload.worker.media.store_inspection import StoredNamespace, check_names, delete, look_into, verify


def run_on_store(verb: str, options: argparse.Namespace) -> int:
    """Carry out that verb; ``options.path`` is the URL. Returns the exit status.

    Raises:
        TierError: the store cannot be had, or has nothing of that name.
        ConfigError: it is no URL, or a file with a secret cannot be read.
    """
    runs: dict[str, Callable[[str, Connection, argparse.Namespace], int]] = {
        "ls": _ls,
        "check": _check,
        "drop": _drop,
        "gc": _gc,
    }
    tier = StoreConfig(url=options.path, password_file=options.password_file, ca_file=options.ca_file)
    with _connected(tier) as connection:
        return runs[verb](tier.shown, connection, options)


@contextmanager
def _connected(tier: StoreConfig) -> Iterator[Connection]:
    try:
        connection = Connection(tier.address, ca_file=tier.ca_file)
        try:
            yield connection
        finally:
            connection.close()
    except StoreError as error:
        raise TierError(
            f"the store at {tier.shown} refuses us: {str(error).rstrip('.')}. Give the URL, and the "
            f"password, of a user that may SCAN and UNLINK"
        ) from error
    except OSError as error:
        raise TierError(
            f"the store at {tier.shown} does not answer: {error}; start it, or correct the URL"
        ) from error


def _ls(shown: str, connection: Connection, options: argparse.Namespace) -> int:
    found = look_into(connection)
    if options.json:
        _print_json(shown, {"namespaces": [_row(each) for each in found]})
        return 0
    total = sum(each.num_bytes for each in found)
    print(f"{shown}: {len(found)} namespaces, {total / GIB:.2f} GiB")
    if found:
        columns = ["name", "GiB", "extents", "private", "ranks"]
        print(
            format_table(
                columns,
                [
                    [
                        each.name,
                        f"{each.num_bytes / GIB:.2f}",
                        f"{each.num_extents:,}",
                        f"{each.num_private:,}",
                        str(len(each.ranks)),
                    ]
                    for each in found
                ],
            )
        )
    return 0


def _check(shown: str, connection: Connection, options: argparse.Namespace) -> int:
    if options.names:
        check_names(look_into(connection), options.names)
    found = verify(connection, options.names)
    rows = [
        {"name": name, "num_extents": num_extents, "num_broken": num_broken}
        for name, (num_extents, num_broken) in sorted(found.items())
    ]
    if options.json:
        _print_json(shown, {"namespaces": rows})
    for name, (num_extents, num_broken) in [] if options.json else sorted(found.items()):
        print(f"{name}: {num_extents - num_broken:,} of {num_extents:,} extents are whole")
    return int(any(num_broken for _, num_broken in found.values()))


def _drop(shown: str, connection: Connection, options: argparse.Namespace) -> int:
    if options.names:
        check_names(look_into(connection), options.names)
    return _say_deleted(shown, connection, delete(connection, options.names), options)


def _gc(shown: str, connection: Connection, options: argparse.Namespace) -> int:
    return _say_deleted(shown, connection, delete(connection, [], private_only=True), options)


def _say_deleted(shown: str, connection: Connection, num_deleted: int, options: argparse.Namespace) -> int:
    left = look_into(connection)
    if options.json:
        _print_json(shown, {"num_deleted": num_deleted, "left": [_row(each) for each in left]})
        return 0
    num_left = sum(each.num_extents for each in left)
    print(f"deleted  {num_deleted:,} extents")
    print(f"left     {num_left:,} extents, {sum(each.num_bytes for each in left) / GIB:.2f} GiB")
    return 0


def _row(namespace: StoredNamespace) -> dict[str, Any]:
    return {
        "name": namespace.name,
        "num_ranks": len(namespace.ranks),
        "num_extents": namespace.num_extents,
        "num_private": namespace.num_private,
        "num_bytes": namespace.num_bytes,
    }


def _print_json(shown: str, told: dict[str, Any]) -> None:
    print(json.dumps({"store": shown, **told}, indent=2))
