"""``kv-offload pool``: looks at regions of pools that outlive their engines, and deletes them."""

import argparse
import json
import time
from pathlib import Path
from typing import Any

from offload.errors import OffloadError
from offload.files.tier_path import Found, delete_named, find_named, held, kept_root, look_around
from offload.pool_config import pool_root
from offload.settings import GIB
from offload.sizing.tables import format_table
from offload.tier_command import model_of
from offload.worker.pool.region import look_into

_COLUMNS = ["name", "GiB", "opened", "owned", "blocks", "slots", "rank", "model"]


def add_pool_command(commands: Any) -> None:
    """Add the subcommand to those of a parser."""
    pool: argparse.ArgumentParser = commands.add_parser(
        "pool",
        help="look at pools in shared memory, and delete them",
        description="Looks after what engines keep below a path that is the path of a pool in shared memory.",
    )
    verbs = pool.add_subparsers(dest="verb", required=True)
    _add(verbs, "ls", _ls, "list regions: size, when opened last, owner, blocks, model")
    remove = _add(verbs, "rm", _rm, "delete regions that no engine owns, and all KV in them")
    remove.add_argument("names", nargs="*", metavar="NAME", help="regions, as ls names them (default: all)")


def _add(verbs: Any, name: str, run: Any, text: str) -> argparse.ArgumentParser:
    description = f"{text[0].upper()}{text[1:]}."
    parser: argparse.ArgumentParser = verbs.add_parser(name, help=text, description=description)
    parser.add_argument(
        "path", type=Path, metavar="PATH", help="the pool's path, as the configuration has it"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.set_defaults(run=run)
    return parser


def _ls(options: argparse.Namespace) -> int:
    root = _root(options.path)
    with held(root):
        found = find_named(root, [])
    rows = [_row(each) for each in found]
    if options.json:
        print(json.dumps({"root": str(root), "regions": rows}, indent=2))
        return 0
    total = sum(each.num_bytes for each in found)
    print(f"{root}: {len(rows)} {'region' if len(rows) == 1 else 'regions'}, {total / GIB:.2f} GiB")
    if rows:
        print(format_table(_COLUMNS, [_cells(row) for row in rows]))
    for row in rows:
        if row["error"] is not None:
            print(f"{row['name']}: {row['error']}")
    return 0


def _rm(options: argparse.Namespace) -> int:
    root = _root(options.path)
    with held(root):
        free = [each.path.name for each in look_around(root) if not each.is_owned]
    deleted = delete_named(root, options.names or free) if options.names or free else []
    if options.json:
        rows = [{"name": each.path.name, "num_bytes": each.num_bytes} for each in deleted]
        print(json.dumps({"root": str(root), "deleted": rows}, indent=2))
        return 0
    for each in deleted:
        print(f"deleted  {each.path.name}, {each.num_bytes / GIB:.2f} GiB")
    if not deleted:
        print("there is nothing to delete")
    return 0


def _root(path: Path) -> Path:
    return kept_root(path, pool_root(path.absolute()))


def _row(found: Found) -> dict[str, Any]:
    row: dict[str, Any] = {
        "name": found.path.name,
        "num_bytes": found.num_bytes,
        "opened_at": found.used_at or None,
        "is_owned": found.is_owned,
        "num_blocks": None,
        "num_slots": None,
        "epoch": None,
        "rank": None,
        "model": None,
        "namespace": None,
        "error": None,
    }
    try:
        contents = look_into(found.path)
    except OffloadError as error:
        return row | {"error": str(error)}
    if contents is None:
        return row
    superblock, num_slots, num_blocks = contents
    told, _, rank = superblock.namespace.rpartition("\n")
    return row | {
        "num_blocks": num_blocks,
        "num_slots": num_slots,
        "epoch": superblock.epoch,
        "rank": rank.partition(",")[0].removeprefix("rank "),
        "model": model_of(told),
        "namespace": superblock.namespace,
    }


def _cells(row: dict[str, Any]) -> list[str | None]:
    opened = row["opened_at"]
    when = None if opened is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(opened))
    counts = [None if row[key] is None else f"{row[key]:,}" for key in ("num_blocks", "num_slots")]
    owned = "yes" if row["is_owned"] else "no"
    return [row["name"], f"{row['num_bytes'] / GIB:.2f}", when, owned, *counts, row["rank"], row["model"]]
