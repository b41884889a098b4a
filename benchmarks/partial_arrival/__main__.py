"""What does a request of a batch wait for whose KV arrived, when that of others did not?

    python -m benchmarks.partial_arrival [--lost 0,1,2,4,8] [--rounds 3] [--json FILE]

A batch of `--batch` prompts comes at once to an engine whose pool has the KV of some. Of so many as `--lost`
says it lacks KV, in two scenes:

- whole: nobody has ever computed these prompts.
- tail: only the first three quarters of them arrived.

Compared are two modes, in turns, with the same prompts and the same pool:

- missing only: what the connector does. Each request computes the tokens that it lacks.
- all or nothing: with one request lost all of them compute all of their tokens. Here the hint
  `cpu_offload_load: false` makes them do so.

Prompts are new in every round, and the order of lost ones among the others is random. Neither mode stores
anything, so that the second finds the pool as the first did. Rows: seconds to the first token, p50 and p95
over all requests of all rounds, of those lost and of those that arrived; seconds to the last token of those
that arrived; tokens computed in a batch, and how many were missing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

import numpy as np

from benchmarks.common import report
from benchmarks.common.arguments import add_numbers, parser_of
from benchmarks.common.tables import Column, table
from benchmarks.long_document_qa.arguments import add_engine_arguments, make_settings
from benchmarks.long_document_qa.settings import Settings
from benchmarks.long_document_qa.workload import Prompt
from benchmarks.partial_arrival.engine import Answered, BatchProcess
from offload.testing.engines.process import EngineError

__all__ = ["BATCH_DEFAULTS", "SCENES", "Batch", "draw_batch", "main", "row_of"]

SCENES = ("whole", "tail")
_OURS, _ALL_OR_NOTHING = "missing only", "all or nothing"
_NO_STORE = {"cpu_offload_store": False}
_HINTS = {_OURS: _NO_STORE, _ALL_OR_NOTHING: {**_NO_STORE, "cpu_offload_load": False}}
_FIRST_ID = 3
BATCH_DEFAULTS: dict[str, Any] = {"document_tokens": 3584, "question_tokens": 1, "cpu_documents": 12}
"""What differs from the settings of long_document_qa: a prompt is a document and the one token behind it."""
_COLUMNS = (
    Column("scene", "scene"),
    Column("lost", "lost"),
    Column("mode", "mode"),
    Column("missing", "tokens_missing", ","),
    Column("computed", "tokens_computed", ","),
    Column("lost: first p50, s", "lost_first_p50", ".2f"),
    Column("p95", "lost_first_p95", ".2f"),
    Column("arrived: first p50, s", "arrived_first_p50", ".2f"),
    Column("p95 ", "arrived_first_p95", ".2f"),
    Column("last p95, s", "arrived_last_p95", ".2f"),
)


class Batch(NamedTuple):
    """The prompts of one round.

    Attributes:
        prompts: token ids of each.
        num_arrived: by prompt how many of its tokens, full blocks, the pool is to have.
        is_lost: by prompt whether it lacks any.
    """

    prompts: list[Prompt]
    num_arrived: list[int]
    is_lost: list[bool]

    @property
    def arrived(self) -> list[Prompt]:
        """What the pool is to have."""
        pairs = zip(self.prompts, self.num_arrived, strict=True)
        return [prompt[:number] for prompt, number in pairs if number]

    @property
    def num_missing(self) -> int:
        """Tokens that nobody has KV of; the last of each prompt is always computed."""
        return sum(map(len, self.prompts)) - sum(self.num_arrived)


def draw_batch(settings: Settings, size: int, scene: str, lost: int, number: int) -> Batch:
    """The batch of round ``number``: ``lost`` of ``size`` prompts lack KV as ``scene`` says."""
    workload = settings.workload
    rng = np.random.default_rng([workload.seed, SCENES.index(scene), lost, number])
    tokens = workload.document_tokens + workload.question_tokens
    prompts = list(rng.integers(_FIRST_ID, workload.vocab_size, (size, tokens), dtype=np.int32))
    whole = workload.document_tokens // settings.block_size
    left = 0 if scene == "whole" else whole * 3 // 4
    is_lost = [bool(place < lost) for place in rng.permutation(size)]
    return Batch(prompts, [settings.block_size * (left if each else whole) for each in is_lost], is_lost)


def row_of(
    scene: str, lost: int, mode: str, rounds: Sequence[tuple[Batch, list[Answered]]]
) -> dict[str, Any]:
    """The row of all rounds of one mode; seconds. Where nobody is lost, or nobody arrived, None."""
    each = [
        (is_lost, one)
        for batch, answered in rounds
        for is_lost, one in zip(batch.is_lost, answered, strict=True)
    ]
    gone = [one.first_seconds for is_lost, one in each if is_lost]
    here = [one for is_lost, one in each if not is_lost]
    return {
        "scene": scene,
        "lost": lost,
        "mode": mode,
        "rounds": len(rounds),
        "tokens_missing": max(batch.num_missing for batch, _ in rounds),
        "tokens_computed": max(sum(one.num_computed for one in answered) for _, answered in rounds),
        "lost_first_p50": _percentile(gone, 50),
        "lost_first_p95": _percentile(gone, 95),
        "arrived_first_p50": _percentile([one.first_seconds for one in here], 50),
        "arrived_first_p95": _percentile([one.first_seconds for one in here], 95),
        "arrived_last_p95": _percentile([one.last_seconds for one in here], 95),
        "all_first_max": max(one.first_seconds for _, one in each),
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the comparison and print its table; returns 0, or 1 if the engine failed."""
    parser = _parser()
    options = parser.parse_args(arguments)
    given = {name: value for name, value in vars(options).items() if value is not None}
    try:
        settings = make_settings(
            {**BATCH_DEFAULTS, **given, "concurrency": options.batch, "gpu_documents": options.batch}
        )
        if any(lost > options.batch for lost in options.lost):
            raise ValueError(f"lost={options.lost}: must be at most batch={options.batch}")
    except ValueError as error:
        parser.error(str(error))
    notes = report.load_note()
    rows: list[dict[str, Any]] = []
    try:
        with BatchProcess(settings) as engine:
            engine.warm_up()
            for scene in SCENES:
                for lost in options.lost:
                    if lost or scene == SCENES[0]:
                        rows += _measure(settings, engine, scene, lost, options)
                        print(f"  {rows[-1]}", file=sys.stderr, flush=True)
    except EngineError as failure:
        print(f"error: {failure}", file=sys.stderr)
        return 1
    print(table(_COLUMNS, rows))
    for note in notes:
        print(note)
    told = {"batch": options.batch, "lost": options.lost, "rounds": options.rounds, **asdict(settings)}
    report.write(options.json, rows, settings=told, notes=notes)
    return 0


def _measure(
    settings: Settings, engine: BatchProcess, scene: str, lost: int, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """A row for each mode; with nobody lost they are the same, and the second is not run."""
    modes = (_OURS, _ALL_OR_NOTHING) if lost else (_OURS,)
    seen: dict[str, list[tuple[Batch, list[Answered]]]] = {mode: [] for mode in modes}
    for number in range(options.rounds):
        batch = draw_batch(settings, options.batch, scene, lost, number)
        engine.prime(batch.arrived)
        for mode in modes if number % 2 == 0 else modes[::-1]:
            answered = engine.batch(batch.prompts, settings.workload.output_tokens, _HINTS[mode])
            seen[mode].append((batch, answered))
    return [row_of(scene, lost, mode, seen[mode]) for mode in modes]


def _percentile(values: Sequence[float], percent: int) -> float | None:
    return round(float(np.percentile(values, percent)), 4) if values else None


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("partial_arrival", __doc__)
    add = parser.add_argument
    counts = [0, 1, 2, 4, 8]
    add("--lost", type=_counts, default=counts, metavar="N,...", help="requests (default: 0,1,2,4,8)")
    add_numbers(parser, ("batch", 8, "requests that come at once"), ("rounds", 3, "per scene, mode and loss"))
    add("--document-tokens", type=int, metavar="N", help="of a prompt, but for its last (default: 3584)")
    add("--output-tokens", type=int, metavar="N", help="per answer (default: 10)")
    add("--seed", type=int, metavar="N", help="of prompts and order (default: 0)")
    add_engine_arguments(parser.add_argument_group("engine (its GPU cache holds the batch)"))
    return parser


def _counts(text: str) -> list[int]:
    parts = text.split(",")
    if not all(part.strip().isdecimal() for part in parts):
        raise argparse.ArgumentTypeError(f"{text!r}: must be whole numbers with commas between")
    return [int(part) for part in parts]


if __name__ == "__main__":
    sys.exit(main())
