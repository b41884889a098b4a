"""``kv-offload size``: how much memory for the pool is worth it, by a trace of requests."""

import argparse
import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

from evictor import available_policies
from offload.config import DEFAULT_POLICY, unwritable
from offload.errors import OffloadError
from offload.observe.trace import IDS_BLOCK_TOKENS, read_trace
from offload.sizing.capacity import Sizing, size_pool
from offload.sizing.kv_bytes import TokenBytes, bytes_per_token
from offload.sizing.tables import format_table

_ENOUGH = 0.9
"""The share of all hits there are that answers the question how much memory is worth it."""


def add_size_command(commands: Any) -> None:
    """Add the subcommand to those of a parser."""
    parser: argparse.ArgumentParser = commands.add_parser(
        "size",
        help="tell how much memory for the pool is worth it: hit rate against capacity, from a trace",
        description="Replays a trace through pools of several sizes and prints the hit rate of each.",
    )
    parser.add_argument(
        "--trace",
        type=Path,
        required=True,
        metavar="FILE",
        help="as recorded with record_trace, or Mooncake's",
    )
    parser.add_argument(
        "--model-config",
        required=True,
        metavar="DIR|BYTES",
        help="the model's directory (its config.json is read), or its bytes of KV per token over all ranks",
    )
    parser.add_argument(
        "--policy",
        default=DEFAULT_POLICY,
        choices=available_policies(),
        help="eviction policy (default: %(default)s)",
    )
    parser.add_argument(
        "--gib",
        metavar="LIST",
        help="sizes of the pool in GiB, such as 8,16,32 (default: from 1%% to all of what the trace has)",
    )
    parser.add_argument("--plot", type=Path, metavar="FILE.png", help="write hit rate against GiB as a PNG")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write settings and rows as JSON")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> None:
    """Carry out the command.

    Raises:
        OffloadError: a file that is no trace or cannot be written, a model that cannot be counted, sizes
            that are no numbers, or a plot without matplotlib.
    """
    gib = None if options.gib is None else _numbers(options.gib)
    token = _token_bytes(options.model_config)
    _check_output("--json", options.json)
    _check_output("--plot", options.plot)
    if options.plot is not None:
        _check_matplotlib()
    try:
        trace = read_trace(options.trace)
    except OSError as error:
        raise OffloadError(
            f"--trace {options.trace}: {error.strerror}; record one with record_trace in "
            f"kv_connector_extra_config"
        ) from None
    sizing = size_pool(trace, token.count, policy=options.policy, gib=gib)
    print(report(sizing, token))
    if options.json is not None:
        _write("--json", options.json, _json(sizing, options).encode())
    if options.plot is not None:
        _write("--plot", options.plot, _plot(sizing, options.trace.name))


_CHECKPOINTS = (
    "The model has windows or states, so requests go on at checkpoints only. The second ask of a document "
    "finds up to one step of the engine less than this says. Short prompts take more bytes per token."
)


def report(sizing: Sizing, token: TokenBytes) -> str:
    """The table, and a sentence that says how much memory is worth it."""
    made_of = f" ({token.made_of})" if token.made_of else ""
    lines = [
        f"requests   {sizing.requests:,}, {sizing.prompt_tokens:,} prompt tokens, "
        f"{sizing.prompt_blocks:,} full blocks of {IDS_BLOCK_TOKENS}, {sizing.distinct_blocks:,} different",
        f"KV         {token.count:,} bytes per token{made_of}",
        f"policy     {sizing.policy}",
        "",
        format_table(
            ["GiB", "blocks", "of all", "hit rate", "points per GiB more"],
            [
                (
                    _size(row.gib),
                    f"{row.capacity_blocks}",
                    f"{row.capacity_fraction:.1%}",
                    f"{row.hit_rate:.1%}",
                    f"{row.points_per_gib:.3g}",
                )
                for row in sizing.rows
            ],
        ),
        "",
        "Sizes are rounded down to whole blocks; the last row is a pool without limit.",
        _answer(sizing),
    ]
    if token.has_checkpoints:
        lines.append(_CHECKPOINTS)
    return "\n".join(lines)


def _answer(sizing: Sizing) -> str:
    most, enough = sizing.rows[-1], sizing.enough(_ENOUGH)
    if not most.hit_rate:
        return "No prompt begins with a block of an earlier one: a pool of any size would find nothing."
    text = f"A pool without limit ({_size(most.gib)} GiB) would find {most.hit_rate:.1%} of the blocks"
    if enough is most:
        return f"{text}; none of the smaller sizes finds {_ENOUGH:.0%} of that."
    return (
        f"{text}. {_size(enough.gib)} GiB find {enough.hit_rate:.1%}, the smallest of these sizes with at "
        f"least {_ENOUGH:.0%} of that."
    )


def _size(gib: float) -> str:
    return f"{gib:.1f}" if gib >= 1 else f"{gib:.3g}"


def _numbers(text: str) -> list[float]:
    try:
        sizes = [float(each) for each in text.split(",")]
    except ValueError:
        sizes = [math.nan]
    if not all(0 < each < math.inf for each in sizes):
        raise OffloadError(
            f"--gib {text!r}: give sizes in GiB, positive numbers with commas between, such as 8,16,32"
        )
    return sizes


def _token_bytes(model: str) -> TokenBytes:
    try:
        return bytes_per_token(model)
    except OffloadError as error:
        raise type(error)(f"--model-config {error}") from None


def _check_output(option: str, path: Path | None) -> None:
    reason = None if path is None else unwritable(path)
    if reason is not None:
        raise OffloadError(f"{option} {path}: {reason}; name a file in a directory that you may write to")


def _check_matplotlib() -> None:
    try:
        import matplotlib  # noqa: F401
    except ModuleNotFoundError:
        raise OffloadError(
            "--plot needs matplotlib, which is not installed; pip install matplotlib"
        ) from None


def _write(option: str, path: Path, content: bytes) -> None:
    try:
        path.write_bytes(content)
    except OSError as error:
        raise OffloadError(f"{option} {path}: {error.strerror}; name a file that can be written") from None
    print(f"{option.removeprefix('--'):<10} {path}")


def _json(sizing: Sizing, options: argparse.Namespace) -> str:
    meta = {"trace": options.trace.name, "block_tokens": IDS_BLOCK_TOKENS, **asdict(sizing)}
    rows = meta.pop("rows")
    return json.dumps({"meta": meta, "rows": rows}, indent=2) + "\n"


def _plot(sizing: Sizing, name: str) -> bytes:
    """A PNG of hit rate against GiB."""
    from offload.sizing.plot import draw

    return draw(sizing, f"{name}, {sizing.policy}, {sizing.bytes_per_token:,} bytes of KV per token", _ENOUGH)
