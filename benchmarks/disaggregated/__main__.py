"""Do long prompts still make running answers wait when another engine computes them?

    python -m benchmarks.disaggregated [--demo] [--rounds 3] [--plot FILE] [--json FILE]

Real vLLM servers on the CPU backend, of one small model with random weights. *One engine* prefills and
decodes. The *fleet* has one engine that prefills, two that decode, and `kv-offload proxy` before them. Both
get the same: answers that run, and meanwhile long prompts, one after the other. Rounds take turns.

*Between tokens* is the time from one token of a running answer to the next, over all of them. *First token*
is what a client with a long prompt waits. *Computed* is what engines that decode computed of the long
prompts, *fetched* what came from the one that prefills. Elapsed milliseconds; percentiles over all rounds.

With `--demo` there is one round, and a plot.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import random
import statistics
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.common import report
from benchmarks.common.arguments import add_numbers, parser_of, settings_of
from benchmarks.common.plots import panels
from benchmarks.common.prompts import draw_tokens
from benchmarks.common.servers import Servers
from benchmarks.common.tables import Column, table
from offload.testing.engines.client import HttpServer
from offload.testing.proxies import kv_offload_proxy

__all__ = ["main"]

_BLOCK = 32
_VOCABULARY = 512
_SHORT = 64
"""Tokens of the prompt of a running answer."""
_LONG_ANSWER = 8
ONE, FLEET = "one engine", "fleet"
_COLUMNS = (
    Column("asked", "asked"),
    Column("between tokens: p50 ms", lambda row: 1e3 * row["between_p50"], ".1f"),
    Column("p99 ms", lambda row: 1e3 * row["between_p99"], ".1f"),
    Column("longest ms", lambda row: 1e3 * row["between_max"], ".0f"),
    Column("first token: p50 ms", lambda row: 1e3 * row["first_p50"], ".0f"),
    Column("computed", "computed", ",d"),
    Column("fetched", "fetched", ",d"),
    Column("of", "prompt_tokens", ",d"),
)


class _Asked(NamedTuple):
    """Who is asked, and the engines that decode behind it."""

    front: HttpServer
    decode: Sequence[HttpServer]


@dataclass(slots=True)
class _Seen:
    """Seconds between tokens of running answers, and to first tokens of long prompts; tokens that moved."""

    between: list[float] = field(default_factory=list)
    first: list[float] = field(default_factory=list)
    computed: int = 0
    fetched: int = 0
    prompt_tokens: int = 0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and print its table; returns the exit code."""
    parser = parser_of("disaggregated", __doc__)
    parser.add_argument("--demo", action="store_true", help="one round, and a plot beside the table")
    parser.add_argument("--plot", type=Path, help="draw what was measured into this PNG")
    add_numbers(
        parser,
        ("rounds", 3, "in which both have a turn"),
        ("answers", 2, "that run meanwhile"),
        ("prompts", 6, "long ones of a round"),
        ("prompt-tokens", 4000, "of a long one"),
        ("chunk", 2048, "tokens of a step"),
    )
    options = parser.parse_args(argv)
    if options.demo:
        options.rounds = 1
        options.plot = options.plot or Path("disaggregated.png")
    notes = report.load_note()
    seen = {ONE: _Seen(), FLEET: _Seen()}
    with _started(options) as asked:
        rng = random.Random(0)
        for _ in range(options.rounds):
            for name, who in asked.items():
                _round(who, options, rng, seen[name])
                print(f"{name}: {len(seen[name].first)} long prompts are answered", file=sys.stderr)
    rows = [_row(name, each) for name, each in seen.items()]
    print(table(_COLUMNS, rows))
    for note in notes:
        print(note)
    if options.plot is not None:
        _draw(options.plot, seen)
        print(f"plot: {options.plot}")
    report.write(options.json, rows, settings=settings_of(options), notes=notes)
    return 0


# Engines


@contextlib.contextmanager
def _started(options: argparse.Namespace) -> Iterator[dict[str, _Asked]]:
    longest = options.prompt_tokens + 1024
    with Servers(
        longest, block=_BLOCK, vocabulary=_VOCABULARY, step_tokens=options.chunk, gpu_tokens=4 * longest
    ) as started:
        listen = f"127.0.0.1:{started.port()}"
        configs: dict[str, dict[str, Any]] = {
            "prefill": {"cpu_gib": 1, "role": "prefill", "listen": listen},
            "decode-1": {"cpu_gib": 1, "role": "decode", "peers": [listen], "peer_wait_seconds": 30},
            "decode-2": {"cpu_gib": 1, "role": "decode", "peers": [listen], "peer_wait_seconds": 30},
            "one": {"cpu_gib": 1},
        }
        servers = {name: started.start(name, config) for name, config in configs.items()}
        https = {name: server.ready().http for name, server in servers.items()}
        decode = [https["decode-1"], https["decode-2"]]
        proxy = kv_offload_proxy([https["prefill"].base_url], [each.base_url for each in decode])
        with proxy.running():
            yield {ONE: _Asked(https["one"], [https["one"]]), FLEET: _Asked(HttpServer(proxy.url), decode)}


# A round


def _round(asked: _Asked, options: argparse.Namespace, rng: random.Random, seen: _Seen) -> None:
    """Answers run, and long prompts come; what is between tokens counts while there is a long prompt."""
    is_over = threading.Event()
    are_running = threading.Barrier(options.answers + 1)
    bodies = [
        {"prompt": draw_tokens(rng, _SHORT, _VOCABULARY, first=3), "max_tokens": 512}
        for _ in range(options.answers)
    ]
    times: list[list[float]] = [[] for _ in bodies]
    threads = [
        threading.Thread(target=_run, args=(asked.front, body, found, are_running, is_over))
        for body, found in zip(bodies, times, strict=True)
    ]
    for thread in threads:
        thread.start()
    are_running.wait()
    before, began = _moved(asked.decode), time.perf_counter()
    for _ in range(options.prompts):
        prompt = draw_tokens(rng, options.prompt_tokens, _VOCABULARY, first=3)
        seen.first.append(asked.front.first_token({"prompt": prompt, "max_tokens": _LONG_ANSWER}))
        seen.prompt_tokens += len(prompt)
    ended, after = time.perf_counter(), _moved(asked.decode)
    is_over.set()
    for thread in threads:
        thread.join()
    seen.computed += after.computed - before.computed
    seen.fetched += after.fetched - before.fetched
    for found in times:
        within = [at for at in found if began <= at <= ended]
        seen.between += [later - at for at, later in itertools.pairwise(within)]


def _run(
    server: HttpServer,
    body: Mapping[str, Any],
    times: list[float],
    are_running: threading.Barrier,
    is_over: threading.Event,
) -> None:
    """Ask again and again for a long answer, and note when its tokens come."""
    has_begun = False
    whole = {"temperature": 0.0, "ignore_eos": True, **body, "stream": True}
    while not is_over.is_set():
        with server.open("/v1/completions", whole) as response:
            for line in response:
                if not line.startswith(b"data:") or line[5:].strip() == b"[DONE]":
                    continue
                if json.loads(line[5:]).get("choices"):
                    times.append(time.perf_counter())
                if not has_begun:
                    has_begun = True
                    are_running.wait()
                if is_over.is_set():
                    return


class _Moved(NamedTuple):
    computed: int
    fetched: int


def _moved(engines: Sequence[HttpServer]) -> _Moved:
    """Prompt tokens that they have computed so far, and tokens that came from other engines."""
    pages = [engine.metrics() for engine in engines]
    computed = sum(page["vllm:prompt_tokens"] - page["vllm:prompt_tokens_cached"] for page in pages)
    return _Moved(int(computed), int(sum(page["vllm:cpu_offload_restored_tokens"] for page in pages)))


# What is shown


def _row(name: str, seen: _Seen) -> dict[str, Any]:
    parts = statistics.quantiles(seen.between, n=100)
    return {
        "asked": name,
        "between_p50": parts[49],
        "between_p99": parts[98],
        "between_max": max(seen.between),
        "tokens": len(seen.between),
        "first_p50": statistics.median(seen.first),
        "all_first": seen.first,
        "computed": seen.computed,
        "fetched": seen.fetched,
        "prompt_tokens": seen.prompt_tokens,
    }


def _draw(path: Path, seen: Mapping[str, _Seen]) -> None:
    with panels(
        path, 2, (4.2, 3.2), "long prompts beside running answers", loc="lower center", ncol=2
    ) as axes:
        for name, each in seen.items():
            ordered = sorted(1e3 * value for value in each.between)
            shares = [100 * (at + 1) / len(ordered) for at in range(len(ordered))]
            axes[0].plot(shares, ordered, label=name)
            axes[1].plot(range(1, len(each.first) + 1), [1e3 * value for value in each.first], label=name)
        axes[0].set_xlabel("percent of tokens")
        axes[0].set_ylabel("ms between tokens, at most")
        axes[1].set_xlabel("long prompt")
        axes[1].set_ylabel("ms to its first token")


if __name__ == "__main__":
    raise SystemExit(main())
