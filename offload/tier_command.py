"""``kv-offload tier``: looks at the directories of tiers on a disk, checks them, and deletes them."""

import argparse
import json
import math
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from offload.errors import OffloadError, TierError
from offload.files.tier_path import (
    Found,
    delete_named,
    delete_unused,
    find_named,
    held,
    is_owned,
    kept_root,
    look_around,
)
from offload.mooncake_command import SCHEME, run_on_mooncake
from offload.settings import GIB
from offload.sizing.tables import format_table
from offload.store_command import run_on_store
from offload.tier_config import root_of, short_name
from offload.worker.media.inspection import Contents, look_into, verify

_LIVE = """\
An engine that runs goes on writing. Until a write has ended, and after one that failed, the log has the
checksums of what was there before.
"""
_BROKEN = """\
What is not whole is never served: it costs a miss. An engine that was killed leaves a few such extents, those
that it was writing. Many of them mean that the disk loses or changes what is written.
"""


def add_tier_command(commands: Any) -> None:
    """Add the subcommand to those of a parser."""
    tier: argparse.ArgumentParser = commands.add_parser(
        "tier",
        help="look at the directories of a disk tier, check them, and delete them",
        description="Looks after what engines keep below the path of a disk tier, or in a store.",
    )
    verbs = tier.add_subparsers(dest="verb", required=True)
    _add(verbs, "ls", _ls, "list directories: size, when opened last, owner, model, extents")
    check = _add(verbs, "check", _check, "read every extent and compare it with its checksums")
    check.add_argument(
        "names", nargs="*", metavar="NAME", help="directories, as ls names them (default: all)"
    )
    drop = _add(verbs, "drop", _drop, "delete directories that no engine owns")
    drop.add_argument("names", nargs="*", metavar="NAME", help="directories, as ls names them (default: all)")
    gc = _add(verbs, "gc", _gc, "delete those that no engine owns, the one unused for longest first")
    gc.add_argument(
        "--gib", type=_gib, metavar="N", help="of a disk: until all take so many GiB (default: 0)"
    )


def _add(
    verbs: Any, name: str, run: Callable[[argparse.Namespace], int], text: str
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = verbs.add_parser(
        name, help=text, description=f"{text[0].upper()}{text[1:]}."
    )
    parser.add_argument(
        "path", metavar="PATH", help="the tier's path, or the url of a store, as the configuration has it"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--password-file", metavar="FILE", help="has the password of a store")
    parser.add_argument("--ca-file", metavar="FILE", help="has certificates that vouch for a store's")

    def run_where(options: argparse.Namespace) -> int:
        if "://" in options.path and getattr(options, "gib", None) is not None:
            raise TierError(
                "a store decides itself how much it keeps, so --gib is of disks only; leave it out"
            )
        if options.path.startswith(SCHEME):
            return run_on_mooncake(name, options)
        if "://" in options.path:
            return run_on_store(name, options)
        options.path = Path(options.path)
        return run(options)

    parser.set_defaults(run=run_where)
    return parser


class _Listed(NamedTuple):
    """A directory and what it has; ``error``: why that cannot be said."""

    found: Found
    contents: Contents | None
    error: str | None


def _ls(options: argparse.Namespace) -> int:
    root = _root(options.path)
    listed = [_look_into(each) for each in _chosen(root, [])]
    rows = [_row(each) for each in listed]
    if options.json:
        _print_json(root, rows)
        return 0
    total = sum(each.found.num_bytes for each in listed)
    print(f"{root}: {_counted(len(rows), 'directory', 'directories')}, {total / GIB:.2f} GiB")
    if rows:
        columns = ["name", "GiB", "opened", "owned", "extents", "places", "namespace", "rank", "model"]
        print(format_table(columns, [_cells(row) for row in rows]))
    for row in rows:
        if row["error"] is not None:
            print(f"{row['name']}: {row['error']}")
    return 0


def _check(options: argparse.Namespace) -> int:
    root = _root(options.path)
    found = _chosen(root, options.names)
    rows, is_live = [], False
    for each in found:
        row = _verified(each)
        row["is_owned"] = each.is_owned or _is_owned_now(root, each)
        is_live |= row["is_owned"] and row["num_broken"] != 0
        rows.append(row)
        if not options.json:
            print(_said(row), flush=True)
    is_broken = any(row["num_broken"] or row["error"] for row in rows)
    if options.json:
        _print_json(root, rows)
        return int(is_broken)
    if not found:
        print(f"{root}: there is nothing to check")
    if any(row["num_broken"] for row in rows):
        print(_BROKEN + (_LIVE if is_live else ""), end="")
    return int(is_broken)


def _drop(options: argparse.Namespace) -> int:
    root = _root(options.path)
    _say_deleted(options, root, delete_named(root, options.names))
    return 0


def _gc(options: argparse.Namespace) -> int:
    root = _root(options.path)
    _say_deleted(options, root, delete_unused(root, int((options.gib or 0.0) * GIB)))
    return 0


def _root(path: Path) -> Path:
    return kept_root(path, root_of(path.absolute()))


def _chosen(root: Path, names: Sequence[str]) -> list[Found]:
    with held(root):
        return find_named(root, names)


def _is_owned_now(root: Path, found: Found) -> bool:
    with held(root):
        return is_owned(found.path)


def _look_into(found: Found) -> _Listed:
    try:
        return _Listed(found, look_into(found.path), None)
    except OffloadError as error:
        return _Listed(found, None, str(error))


def _verified(found: Found) -> dict[str, Any]:
    row: dict[str, Any] = {
        "name": found.path.name,
        "num_extents": 0,
        "num_whole": 0,
        "num_rewritten": 0,
        "num_broken": 0,
        "broken_places": [],
        "num_bytes": 0,
        "seconds": 0.0,
        "error": None,
    }
    start = time.monotonic()
    try:
        verdict = verify(found.path, num_threads=1 if found.is_owned else 4)  # an engine needs its disk
    except OffloadError as error:
        return row | {"error": str(error)}
    return row | {
        "num_extents": verdict.num_extents,
        "num_whole": verdict.num_whole,
        "num_rewritten": verdict.num_rewritten,
        "num_broken": len(verdict.broken),
        "broken_places": verdict.broken,
        "num_bytes": verdict.num_bytes,
        "seconds": time.monotonic() - start,
    }


def _said(row: dict[str, Any]) -> str:
    if row["error"] is not None:
        return f"{row['name']}: {row['error']}"
    text = (
        f"{row['name']}: {row['num_whole']:,} of {row['num_extents']:,} extents are whole, "
        f"{row['num_bytes'] / GIB:.2f} GiB read in {row['seconds']:.1f} s"
    )
    if row["num_rewritten"]:
        text += f"; {row['num_rewritten']:,} were written again meanwhile"
    if row["num_broken"]:
        text += f"; {row['num_broken']:,} are not"
        text += ", which may be writes under way: an engine owns it" if row["is_owned"] else ""
    return text


def _row(listed: _Listed) -> dict[str, Any]:
    found, contents, error = listed
    row: dict[str, Any] = {
        "name": found.path.name,
        "num_bytes": found.num_bytes,
        "opened_at": found.used_at or None,
        "is_owned": found.is_owned,
        "num_extents": None,
        "num_places": None,
        "epoch": None,
        "rank": None,
        "model": None,
        "vllm": None,
        "namespace": None,
        "namespace_name": None,
        "error": error,
    }
    if contents is None:
        return row
    told, _, rank = contents.superblock.namespace.rpartition("\n")
    facts = _facts(told)
    return row | {
        "num_extents": len(contents.records),
        "num_places": contents.shape.num_places,
        "epoch": contents.superblock.epoch,
        "rank": rank.partition(",")[0].removeprefix("rank "),
        "model": model_of(told),
        "vllm": facts.get("vllm"),
        "namespace": contents.superblock.namespace,
        "namespace_name": short_name(told) if told else None,
    }


def _facts(told: str) -> dict[str, Any]:
    """What a namespace says, if it is one of this release."""
    try:
        facts = json.loads(told)
    except ValueError:
        return {}
    return facts if isinstance(facts, dict) else {}


def model_of(told: str) -> str | None:
    """By which name a namespace knows its model."""
    model = _facts(told).get("model")
    if not isinstance(model, dict):
        return None
    return str(model.get("_name_or_path") or model.get("model_type") or "") or None


def _cells(row: dict[str, Any]) -> list[str | None]:
    opened = row["opened_at"]
    when = None if opened is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(opened))
    counts = [None if row[key] is None else f"{row[key]:,}" for key in ("num_extents", "num_places")]
    owned = "yes" if row["is_owned"] else "no"
    whose = [row["namespace_name"], row["rank"], row["model"]]
    return [row["name"], f"{row['num_bytes'] / GIB:.2f}", when, owned, *counts, *whose]


def _say_deleted(options: argparse.Namespace, root: Path, deleted: Sequence[Found]) -> None:
    with held(root):
        left = look_around(root)
    if options.json:
        rows = [{"name": each.path.name, "num_bytes": each.num_bytes} for each in deleted]
        left_rows = [
            {"name": each.path.name, "num_bytes": each.num_bytes, "is_owned": each.is_owned} for each in left
        ]
        print(json.dumps({"root": str(root), "deleted": rows, "left": left_rows}, indent=2))
        return
    for each in deleted:
        print(f"deleted  {each.path.name}, {each.num_bytes / GIB:.2f} GiB")
    owned = [each.path.name for each in left if each.is_owned]
    text = f"left     {_counted(len(left), 'directory', 'directories')}, "
    text += f"{sum(each.num_bytes for each in left) / GIB:.2f} GiB"
    print(text + (f"; engines own {', '.join(owned)}" if owned else ""))


def _print_json(root: Path, rows: Sequence[dict[str, Any]]) -> None:
    print(json.dumps({"root": str(root), "directories": rows}, indent=2))


def _counted(count: int, one: str, several: str) -> str:
    return f"{count:,} {one if count == 1 else several}"


def _gib(text: str) -> float:
    try:
        size = float(text)
    except ValueError:
        size = math.nan
    if not 0 <= size < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is no size; give GiB, 0 or more, such as 100")
    return size
