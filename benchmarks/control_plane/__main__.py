"""What does a connector cost vLLM's scheduler, per block of a request, per decode step and in memory?

    python -m benchmarks.control_plane [--tokens 32768,131072,1048576] [--peers native-lru,native-arc,simple]
                                       [--kind plain,window,mamba] [--json FILE]

One request at a time goes through vLLM's real scheduler (`benchmarks.engine_replay`: no model, no bytes).
Cold: the pool misses, its stores are planned and complete, it finishes. Warm: it hits, its load is planned
and completes, it finishes. Measured is what the scheduler spends in the connector's hooks, by phase. That
is done with a pool that has room for all, and with `--resident` other blocks in it. At last, in the latter,
comes evicting: the pool is full, and every block stored takes the place of another one.

Every connector has a process of its own, as in an engine. Garbage collection is on, and what was there at the
start is frozen. No other connector's objects are looked at. All get the same hashes, run in alternation, and
the medians of `--runs` runs count. A run that did not restore, or store, all blocks ends the benchmark.

Beside it stands the time of hooks in a step that only decodes for 256 requests, 16 of which fill a block. The
memory of the scheduler's process, without the worker side and its pool, is told with `--resident` blocks. For
ours it is told after a churn of `--churn` more blocks, too. Targets are printed beside what they are for; (!)
marks one not met.

Of other kinds than plain, a document of 131,072 tokens is computed and stored in chunks (cold). Then another
question is asked about it (warm). Ours stands beside itself on the group of full attention alone, which is as
many positions. It stands beside vLLM's OffloadingConnector with windows and states kept on the GPU wherever
a chunk ends, with which it restores the same, and beside itself without inner checkpoints (ends only). They
take turns, and the median of ratios side by side counts. Time is that of a processor, not of a clock. What
is restored is handed over to the GPU's cache by a loop of vLLM over blocks. With ours that is in a hook, with
others in vLLM's next step. So it has a column of its own, and is not in the total.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from operator import methodcaller
from typing import Any

from benchmarks.common import report
from benchmarks.common.arguments import add_numbers, at_least, one_of, parser_of, positive, settings_of
from benchmarks.control_plane import figures, kinds
from benchmarks.control_plane.figures import OURS, Row
from benchmarks.control_plane.process import child_of
from benchmarks.control_plane.sizes import BLOCK_TOKENS, DECODE_PROMPT_TOKENS, DECODE_REQUESTS, MOST_TOKENS
from offload.testing.engines.process import EngineError, EngineProcess

__all__ = ["main"]

PEERS = ("native-lru", "native-arc", "simple")
"""vLLM's OffloadingConnector with each policy, and its SimpleCPUOffloadConnector."""
_PLAIN = "plain"
_TOKENS = (32_768, 131_072, 1_048_576)
_KIND_TOKENS = (131_072,)
_MEMORY_PEERS = ("native-lru",)
_CHURN_PARTS = 4
_GROWN_BY = methodcaller("grown_by")


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print tables, write rows. Returns 0, or 1 if a process of the benchmark failed."""
    options = _parser().parse_args(arguments)
    notes = report.load_note()
    for note in notes:
        print(note)
    kinds_asked = [kind for kind in options.kind if kind in kinds.KINDS]
    tables, told, rows = [], {}, []
    try:
        if _PLAIN in options.kind:
            rows = _plain(options)
            told = {"ratios": figures.ratios(rows), "lookup_growth": figures.lookup_growth(rows)}
            tables = [figures.format_phases(rows), figures.format_decode(rows), figures.format_memory(rows)]
            tables += [figures.format_ratios(told["ratios"])] * bool(told["ratios"])
            tables += [figures.format_growth(told["lookup_growth"])] * bool(told["lookup_growth"])
        if kinds_asked:
            lengths = options.tokens or _KIND_TOKENS
            found = kinds.measure(kinds_asked, lengths, options.chunk, options.runs, options.decode_steps)
            told["kinds"] = kinds.ratios(found)
            tables.append(kinds.show(found, told["kinds"]))
            rows += found
    except EngineError as error:
        print(f"control_plane: {error}", file=sys.stderr)
        return 1
    for table in tables:
        print("\n" + table)
    sizes = {"block_tokens": BLOCK_TOKENS, "decode_requests": DECODE_REQUESTS}
    settings = {**settings_of(options), **sizes, "decode_prompt_tokens": DECODE_PROMPT_TOKENS}
    report.write(options.json, rows, settings=settings, notes=notes, **told)
    return 0


def _plain(options: argparse.Namespace) -> list[Row]:
    connectors = (OURS, *options.peers)
    lengths = options.tokens or _TOKENS
    rows: list[Row] = []
    for resident in dict.fromkeys((0, options.resident)):
        rows += _prompts(connectors, lengths, options.runs, resident, resident == options.resident)
    rows += _decode(connectors, options.decode_steps)
    return rows + _memory(connectors, options.resident or 1, options.churn)


def _prompts(
    connectors: Sequence[str], tokens: Sequence[int], runs: int, resident: int, evicting: bool
) -> list[Row]:
    """All connectors in alternation. After ``resident`` blocks and all cold runs the pool is just full."""
    capacity = resident + runs * sum(tokens) // BLOCK_TOKENS
    spent: dict[tuple[str, int, str], list[dict[str, int]]] = {}
    with ExitStack() as stack:
        children = []
        for connector in connectors:
            _tell(f"{connector}: {resident:,} blocks resident")
            children.append(
                stack.enter_context(child_of("prompts", connector, max(tokens), capacity, resident))
            )
        for state in ("cold", "evicting") if evicting else ("cold",):
            for run in range(runs):
                _tell(f"{state}: run {run + 1} of {runs}")
                for num_tokens in tokens:
                    seed = f"{state} {num_tokens} {run}"
                    for child in _rotated(children, run):
                        at = (child.name, num_tokens)
                        cold = child.run(methodcaller("cold", seed, num_tokens))
                        spent.setdefault((*at, state), []).append(cold)
                        warm = child.run(methodcaller("warm", seed, num_tokens))
                        if state == "cold":
                            spent.setdefault((*at, "warm"), []).append(warm)
    return [
        row
        for (connector, num_tokens, state), found in spent.items()
        for row in figures.phase_rows(
            connector, num_tokens, state, capacity if state == "evicting" else resident, found
        )
    ]


def _decode(connectors: Sequence[str], num_steps: int) -> list[Row]:
    rows = []
    for connector in connectors:
        _tell(f"{connector}: decode")
        with child_of("decode", connector, num_steps) as child:
            rows += figures.decode_rows(connector, child.run(methodcaller("steps")))
    return rows


def _memory(connectors: Sequence[str], resident: int, churn: int) -> list[Row]:
    rows = []
    for connector in connectors:
        if connector != OURS and connector not in _MEMORY_PEERS:
            continue
        _tell(f"{connector}: memory")
        with child_of("memory", connector, resident) as child:
            rows.append(figures.memory_row(connector, resident, 0, child.run(_GROWN_BY)))
            for part in range(_CHURN_PARTS) if connector == OURS else ():
                child.run(methodcaller("churn", churn // _CHURN_PARTS, f"churn {part}"))
                churned = (part + 1) * (churn // _CHURN_PARTS)
                rows.append(figures.memory_row(connector, resident, churned, child.run(_GROWN_BY)))
    return rows


def _rotated(children: Sequence[EngineProcess[Any]], by: int) -> list[EngineProcess[Any]]:
    """Everybody is first in one run."""
    by %= len(children)
    return [*children[by:], *children[:by]]


def _tell(what: str) -> None:
    print(f"  {what}", file=sys.stderr, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("control_plane", __doc__)
    add = parser.add_argument
    add(
        "--tokens",
        type=_tokens,
        metavar="N,...",
        help="lengths of the prompts (default: 32768,131072,1048576; 131072 of other kinds than plain)",
    )
    known = (_PLAIN, *kinds.KINDS)
    told = f"kinds of models, of {','.join(known)} (default: {_PLAIN})"
    add("--kind", type=one_of(known), default=(_PLAIN,), metavar="NAME,...", help=told)
    told = f"of {','.join(PEERS)} (default: all)"
    add("--peers", type=one_of(PEERS), default=PEERS, metavar="NAME,...", help=told)
    churned = "blocks stored into a full pool before memory is read again"
    add_numbers(
        parser,
        ("runs", 5, "of each measurement, in alternation"),
        ("resident", 1_000_000, "blocks in the pool of the second part, and of the memory"),
        ("decode-steps", 1024, "that are measured, after as many others", at_least(2)),
        ("churn", 10_000_000, churned, at_least(_CHURN_PARTS)),
        ("chunk", 8192, "tokens computed in a step, of other kinds than plain"),
    )
    return parser


def _tokens(text: str) -> tuple[int, ...]:
    found = []
    for part in text.split(","):
        value = positive(part)
        if value < BLOCK_TOKENS or value % BLOCK_TOKENS or value > MOST_TOKENS:
            raise argparse.ArgumentTypeError(
                f"{value}: must be a multiple of {BLOCK_TOKENS}, from {BLOCK_TOKENS} to {MOST_TOKENS}"
            )
        found.append(value)
    return tuple(dict.fromkeys(found))


if __name__ == "__main__":
    sys.exit(main())
