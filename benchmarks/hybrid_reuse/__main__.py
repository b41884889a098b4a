"""How much of a document is computed again when it is asked again, on models with windows or states?

    python -m benchmarks.hybrid_reuse [--shapes gemma-3] [--engines] [--json FILE]

Documents are asked again and again, each time with another question. Before every request the GPU's cache has
forgotten everything, so that what is found comes from the pool. It runs on vLLM's real scheduler
(`benchmarks.engine_replay`: no model, no bytes). So nothing here depends on the machine. At last, `--engines`
are real ones of tiny models, where vLLM tells what each request computed.

Models are shapes: five groups with windows of 1,024 tokens and one with full attention (gemma-3), one with a
window of 128 and a full one (gpt-oss), three with states and a full one in blocks of 544 (qwen3-next).

Connectors: none; vLLM's OffloadingConnector (native) and its SimpleCPUOffloadConnector; ours. `all kept`:
vLLM is told to keep windows and states of all places on the GPU (`prefix_cache_retention_interval` None),
not only where prompts end and part. `ends only`: ours without the inner checkpoints that it stores where
chunks end. All have pools of the same bytes. What ours stores where there is room for everything takes half
of a pool, all of it, or more than there is.

Per row: tokens of a document that are computed at its first ask, its second and so on, in the mean; the most
at a second one; those that our pool had evicted before it. Then, where several requests for a document that
was asked once arrive at the same time, what one of them computes. Then slots that our pool has at the end,
how many times the bytes of its prefix these are, and bags that were evicted before anything else.

The bar is for our second ask: one step, or one block, where the pool is half full. Where it is fuller, one
spacing of checkpoints more, and what was evicted. (!) marks a bar missed.
"""

from __future__ import annotations

import argparse
import logging
import random
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from statistics import fmean
from typing import Any

from benchmarks.common import report
from benchmarks.common.arguments import add_numbers, at_least, parser_of
from benchmarks.common.shapes import SHAPES
from benchmarks.common.tables import Column, table
from benchmarks.hybrid_reuse import asking, real
from benchmarks.hybrid_reuse.asking import CONNECTORS, ENDS, OURS, Asked, Document, Sizes
from offload.testing.engines.hybrids import HYBRIDS
from offload.testing.engines.process import EngineError

__all__ = ["main"]

_HALF = "half full"
POOLS = {_HALF: 2.0, "full": 1.0, "a third over": 0.75, "twice over": 0.5}
"""How many slots a pool has for each that ours fills where there is room for everything."""
_ASKED = (
    Column("connector", "connector"),
    Column("document", "document_tokens", ",.0f"),
    Column("computed at ask 1, 2, ...", lambda row: ", ".join(f"{each:,.0f}" for each in row["computed"])),
    Column("most at ask 2", "most", ","),
)
_SIBLING = Column("of a sibling", "siblings", ",.0f")
_BAR = Column("bar", lambda row: {True: "met", False: "(!)", None: "-"}[row["is_met"]])
_COLUMNS = (
    Column("shape", "shape"),
    Column("pool", "pool"),
    Column("slots", "slots", ","),
    *_ASKED,
    Column("evicted before", "missing", ",.0f"),
    _SIBLING,
    Column("prefix slots", "prefix_slots", ","),
    Column("of bags", "bag_slots", ","),
    Column("bytes / prefix", "bytes_with_bags", ".2f"),
    Column("bags thinned", "thinned", ","),
    _BAR,
)
_REAL_COLUMNS = (Column("real engine", "engine"), *_ASKED, _SIBLING, _BAR)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all shapes and pools with all connectors; returns 0, or 1 if a real engine failed."""
    options = vars(_parser().parse_args(arguments))
    json_path, seed = options.pop("json"), options.pop("seed")
    shapes, pools, connectors, engines = (
        options.pop(name) for name in ("shapes", "pools", "connectors", "engines")
    )
    sizes = Sizes(**options)
    logging.disable(logging.WARNING)
    rows = []
    for shape in shapes:
        documents = asking.draw(shape, sizes, random.Random(seed))
        demand = _demand(shape, documents, sizes)
        for pool in pools:
            slots = round(demand * POOLS[pool]) + 1  # so that less than half of the largest is in use
            for connector in connectors:
                print(f"  {shape}, {pool}: {connector}", file=sys.stderr, flush=True)
                rows.append(_row(shape, pool, slots, connector, documents, sizes))
    try:
        real_rows = [row for kind in engines for row in real.measure(kind)]
    except EngineError as error:
        print(f"hybrid_reuse: {error}", file=sys.stderr)
        return 1
    print("\n" + table(_COLUMNS, rows))
    if real_rows:
        print("\n" + table(_REAL_COLUMNS, real_rows))
    report.write(json_path, rows + real_rows, settings={"seed": seed, **asdict(sizes)})
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("hybrid_reuse", __doc__)
    for name, known in (("shapes", SHAPES), ("pools", POOLS), ("connectors", CONNECTORS)):
        parser.add_argument(f"--{name}", nargs="+", choices=known, default=list(known), help="default: all")
    told = "real engines, perhaps none (default: gemma3)"
    parser.add_argument("--engines", nargs="*", choices=HYBRIDS, default=["gemma3"], help=told)
    sizes = Sizes()
    add_numbers(
        parser,
        ("documents", sizes.documents, "how many there are"),
        ("document-tokens", sizes.document_tokens, "of each, a quarter more or less"),
        ("question-tokens", sizes.question_tokens, "of each request, behind the document"),
        ("asks", sizes.asks, "of each document", at_least(2)),
        ("siblings", sizes.siblings, "that arrive at the same time"),
        ("chunk", sizes.chunk, "tokens computed in a step, at most"),
    )
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="decides the lengths (default: 0)")
    return parser


def _demand(shape: str, documents: Sequence[Document], sizes: Sizes) -> int:
    """Slots that ours fills where there is room for everything."""
    num_blocks = sum(len(document.blocks) for document in documents)
    room = 4 * sizes.asks * num_blocks * len(SHAPES[shape])
    with asking.engine_for(shape, OURS, sizes, room) as engine:
        asking.ask_in_turn(engine, documents, sizes)
        stored = asking.stored(engine)
    demand = stored.prefix + stored.bags
    if demand > room // 2:
        raise RuntimeError(f"{demand} of {room} slots are in use: the pool had no room for everything")
    return demand


def _row(
    shape: str, pool: str, slots: int, connector: str, documents: Sequence[Document], sizes: Sizes
) -> dict[str, Any]:
    with asking.engine_for(shape, connector, sizes, slots) as engine:
        asked = asking.ask_in_turn(engine, documents, sizes)
        stored = asking.stored(engine) if connector in (ENDS, OURS) else None
    with asking.engine_for(shape, connector, sizes, slots) as engine:
        siblings = [each for each in asking.ask_together(engine, documents, sizes) if each.ask == 2]
        bar = asking.bar_of(engine) if connector == OURS else None
    second = [each for each in asked if each.ask == 2]
    return {
        "shape": shape,
        "pool": pool,
        "slots": slots,
        "connector": connector,
        "document_tokens": round(fmean(document.num_tokens for document in documents), 1),
        "computed": [_mean(each for each in asked if each.ask == ask) for ask in range(1, sizes.asks + 1)],
        "most": max(each.computed for each in second),
        "siblings": _mean(siblings),
        "missing": _mean(second, "missing") if bar else None,
        "prefix_slots": stored and stored.prefix,
        "bag_slots": stored and stored.bags,
        "bytes_with_bags": round(1 + stored.bags / stored.prefix, 3) if stored and stored.prefix else None,
        "thinned": stored and stored.thinned,
        "near": bar and bar.near,
        "spacing": bar and bar.spacing,
        "is_met": bar and all(bar.is_met_by(each, is_half=pool == _HALF) for each in second),
    }


def _mean(asked: Iterable[Asked], what: str = "computed") -> float:
    return round(fmean(getattr(each, what) for each in asked), 1)


if __name__ == "__main__":
    sys.exit(main())
