"""What do stores and restores cost requests that only decode? Times between tokens, with and without them.

    python -m benchmarks.decode_latency [--mode offload] [--starts 2] [--rounds 3] [--json FILE]

A steady batch decodes all the time. Beside it long side prompts come one at a time, the next one
`--gap-steps` steps after the answer to the last. Compared are an engine without connector and one with
that of `--mode`, under the same side prompts, of two kinds:

- new: no prompt was seen before. With the connector all of them are stored: stores run.
- again: every second one is of a document that the GPU has forgotten. The connector restores it while
  the batch decodes, and stores the others: stores and loads run. Without it all are computed.

A step that computes (part of) a side prompt takes longer, and a connector changes how many of these there
are. So gaps between tokens are told apart. In *decode-only* steps no side prompt was computed: there copies
compete with decoding and with nothing else. A chunk's store ends in the steps behind it, a restore comes
before its prompt is scheduled. *All* steps are what a user sees. The pace counts steps, not seconds, so that
both engines give about as many decode-only gaps. Times are those of the engine's core.

Engines run one at a time, in fresh processes, `--starts` of each in alternating order. Per kind: p50 and
p99 over all gaps of a start, and the geometric mean of their ratios, with to without. The goal: p99 of
decode-only steps within 3% with stores running.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import asdict

from tqdm import tqdm

from benchmarks.common import report
from benchmarks.common.arguments import add_numbers, parser_of
from benchmarks.decode_latency.engine import SteadyProcess
from benchmarks.decode_latency.settings import LatencySettings, make_latency_settings
from benchmarks.decode_latency.summary import BASE, Row, format_goal, format_summary, row_of
from benchmarks.decode_latency.traffic import TRAFFICS, Traffic
from benchmarks.long_document_qa.arguments import add_engine_arguments, add_prompt_arguments, check_memory
from benchmarks.long_document_qa.summary import notes
from offload.testing.engines.process import EngineError

__all__ = ["main"]

_CPU_NOTE = (
    "on a CPU copies take cores and memory bandwidth from the computing itself, on a GPU copy engines make "
    "them: these figures say little about a GPU"
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the comparison; returns 0, or 1 if an engine failed."""
    parser = _parser()
    options = parser.parse_args(arguments)
    given = {name: value for name, value in vars(options).items() if value is not None}
    try:
        settings = make_latency_settings(given)
        check_memory(settings, [options.mode])
    except ValueError as error:
        parser.error(str(error))
    remarks = report.load_note() + notes([options.mode], settings)
    remarks += [_CPU_NOTE] if settings.device == "cpu" else []
    print(_describe(settings))
    rows: list[Row] = []
    try:
        for start in range(1, options.starts + 1):
            for mode in (BASE, options.mode) if start % 2 else (options.mode, BASE):
                rows += _measure(settings, mode, start, options.rounds)
    except EngineError as failure:
        print(f"error: {failure}", file=sys.stderr)
        return 1
    print("\n" + format_summary(rows, options.mode))
    print(format_goal(rows, options.mode))
    for remark in remarks:
        print(remark)
    told = {"mode": options.mode, "starts": options.starts, "rounds": options.rounds, **asdict(settings)}
    report.write(options.json, rows, settings=told, notes=remarks)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("decode_latency", __doc__)
    add = parser.add_argument
    add("--mode", choices=("offload", "native"), default="offload", help="the connector (default: offload)")
    rounds = "per start and kind of traffic"
    add_numbers(parser, ("starts", 2, "fresh engines of each kind"), ("rounds", 3, rounds))
    add("--steady", type=int, metavar="N", help="requests in the steady batch (default: 4; on a GPU 16)")
    add("--side-prompts", type=int, metavar="N", help="per round (default: 10; on a GPU 20)")
    add("--gap-steps", type=int, metavar="N", help="between side prompts (default: 30; on a GPU 50)")
    add_prompt_arguments(
        parser.add_argument_group("side prompts (of 1,024 tokens, on a GPU 8,192; one at a time)")
    )
    add_engine_arguments(
        parser.add_argument_group("engine (the GPU cache holds 2 documents beside the batch)")
    )
    return parser


def _measure(settings: LatencySettings, mode: str, start: int, rounds: int) -> list[Row]:
    """Start one engine and let it have both kinds of traffic; one row for each."""
    rows = []
    total = 1 + len(TRAFFICS) * rounds
    with (
        tqdm(total=total, unit="round", desc=f"start {start}, {mode}", dynamic_ncols=True) as bar,
        SteadyProcess(settings, mode) as engine,
    ):
        engine.warm_up()
        engine.decode(Traffic(settings, "new", 0).next_round())
        bar.update()
        for kind in TRAFFICS:
            traffic = Traffic(settings, kind, start)
            engine.reset()
            for prompt in traffic.to_prime():
                engine.run_round([prompt])
            decoded = []
            for _ in range(rounds):
                decoded.append(engine.decode(traffic.next_round()))
                bar.update()
            rows.append(row_of(start, mode, kind, decoded))
    return rows


def _describe(settings: LatencySettings) -> str:
    side_tokens = settings.workload.document_tokens
    return (
        f"{settings.device}, model {settings.model.shape}: {settings.steady} requests decode beside "
        f"side prompts of {side_tokens:,} tokens,\n{settings.side_prompts} a round, "
        f"{settings.gap_steps} steps apart"
    )


if __name__ == "__main__":
    sys.exit(main())
