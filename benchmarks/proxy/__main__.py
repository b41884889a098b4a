"""What does a proxy in front of prefill and decode engines add, and whom does it answer when an engine dies?

    python -m benchmarks.proxy [--proxy NAME,...] [--toy FILE] [--rounds 3] [--json FILE]

Two prefill and two decode engines that compute nothing (`benchmarks.proxy.canned`) answer at once, in a
process each. Asked are streams of 16 tokens with prompts of `--short` and `--long` token ids, one at a time
and 32 at a time. `direct` is the same two requests without a proxy: first the prefill engine is asked, then
the decode engine. The proxies are:

- kv-offload: `kv-offload proxy`, which asks both engines at once where it can.
- sequential: the same with `--sequential`: the decode engine is asked when the prefill engine has answered.
- vllm-router: from PyPI, round robin.
- toy-like: what vLLM's toy proxy does, with the same libraries.
- toy: vLLM's toy proxy itself, with `--toy FILE`.

They take turns. Rows: milliseconds to the first token, p50 and p99, and what these are above those of
`direct` in the same round, medians of rounds; requests per second; milliseconds of processor that the proxy
takes for a request, user and system, and the requests per second of one core that follow. Each prompt is new,
and each goes through a prefill engine, short ones too. An answer that is not whole is an error. The load, the
engines and the proxy share this machine's cores.

Then one of two prefill engines dies, `--requests-after` streams are asked for, and whole answers are counted.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.common import report
from benchmarks.common.arguments import add_numbers, one_of, parser_of, settings_of
from benchmarks.common.tables import Column, grouped, table
from benchmarks.proxy.dying import answered_after_a_death
from benchmarks.proxy.load import Measured, body_of, cpu_seconds, load, num_prefilled
from offload.testing.proxies import (
    ProxyProcess,
    has_vllm_router,
    kv_offload_proxy,
    toy_like,
    toy_proxy,
    vllm_router,
)
from offload.testing.proxies.process import PORT

__all__ = ["main"]

_DIRECT = "direct"
_AT_A_TIME = (1, 32)
_ALWAYS = ("--min-prefill-tokens", "0")
"""Each request has a prefill leg, as with the others."""
_COLUMNS = (
    Column("proxy", "proxy"),
    Column("prompt", "prompt_tokens", ","),
    Column("at a time", "at_a_time"),
    Column("first p50, ms", "first_p50", ".2f"),
    Column("added", "added_p50", ".2f"),
    Column("first p99, ms", "first_p99", ".2f"),
    Column("added ", "added_p99", ".2f"),
    Column("requests/s", "per_second", ",.0f"),
    Column("ms of CPU", "cpu_ms", ".2f"),
    Column("requests/s of a core", "per_core_second", ",.0f"),
)
_DEATHS = (Column("proxy", "proxy"), Column("asked", "asked"), Column("answered whole", "answered", ".0%"))

Start = Callable[[Sequence[str], Sequence[str]], ProxyProcess]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print tables, write rows; returns 0."""
    parser = _parser()
    options = parser.parse_args(arguments)
    starts = _starts(options.toy)
    if missing := [name for name in options.proxy if name not in starts]:
        parser.error(f"--proxy {missing[0]}: .ci/setup-router has not put vllm-router into .venv/router")
    notes = report.load_note()
    names = [*options.proxy, *(["toy"] if options.toy else [])]
    rows = asyncio.run(_measure({name: starts[name] for name in names}, options))
    deaths = [
        asyncio.run(answered_after_a_death(name, starts[name], options.requests_after)) for name in names
    ]
    print(table(_COLUMNS, rows) + "\n\n" + table(_DEATHS, deaths))
    settings = {**settings_of(options), "toy": options.toy is not None}
    report.write(options.json, [*rows, *deaths], settings=settings, notes=notes)
    return 0


def _starts(toy: Path | None) -> dict[str, Start]:
    starts: dict[str, Start] = {
        "kv-offload": lambda prefill, decode: kv_offload_proxy(prefill, decode, _ALWAYS),
        "sequential": lambda prefill, decode: kv_offload_proxy(prefill, decode, [*_ALWAYS, "--sequential"]),
        "toy-like": toy_like,
    }
    if has_vllm_router():
        starts["vllm-router"] = vllm_router
    if toy is not None:
        starts["toy"] = lambda prefill, decode: toy_proxy(toy, prefill, decode)
    return starts


async def _measure(starts: dict[str, Start], options: argparse.Namespace) -> list[dict[str, Any]]:
    async with AsyncExitStack() as stack:
        enter = stack.enter_async_context
        engine = ["-m", "benchmarks.proxy.canned", "--port", PORT]
        engines = [await enter(ProxyProcess(f"engine {at}", engine)) for at in range(4)]
        urls = [each.url for each in engines]
        proxies = {name: await enter(start(urls[:2], urls[2:])) for name, start in starts.items()}
        rounds: list[dict[str, Any]] = []
        for prompt_tokens, requests in (
            (options.short, options.requests),
            (options.long, options.requests_long),
        ):
            body = body_of(prompt_tokens)
            for at_a_time in _AT_A_TIME:
                for number in range(options.rounds + 1):
                    found = await _round(proxies, urls, body, requests, at_a_time)
                    if number:  # the first warms up
                        rounds += [{**row, "prompt_tokens": prompt_tokens} for row in found]
                print(f"  {prompt_tokens} tokens, {at_a_time} at a time", file=sys.stderr, flush=True)
    keys = ("prompt_tokens", "at_a_time", "proxy")
    return [_medians(own) for own in grouped(rounds, *keys).values()]


async def _round(
    proxies: dict[str, ProxyProcess], urls: list[str], body: bytes, requests: int, at_a_time: int
) -> list[dict[str, Any]]:
    """One turn of each."""
    direct = await load([urls[0], urls[2]], body, requests, at_a_time)
    rows = [_row(_DIRECT, at_a_time, direct, direct, None)]
    for name, proxy in proxies.items():
        before, prefilled = cpu_seconds(proxy.pid), await num_prefilled(urls[:2])
        seen = await load([proxy.url], body, requests, at_a_time)
        rows.append(_row(name, at_a_time, seen, direct, cpu_seconds(proxy.pid) - before))
        rows[-1]["prefilled"] = (await num_prefilled(urls[:2]) - prefilled) / requests
    return rows


def _row(name: str, at_a_time: int, seen: Measured, direct: Measured, cpu: float | None) -> dict[str, Any]:
    if seen.failed:
        raise RuntimeError(f"{name}: {seen.failed} answers were not whole")
    count = len(seen.first)
    return {
        "proxy": name,
        "at_a_time": at_a_time,
        "requests": count,
        "first_p50": seen.percentile(50),
        "first_p99": seen.percentile(99),
        "added_p50": seen.percentile(50) - direct.percentile(50),
        "added_p99": seen.percentile(99) - direct.percentile(99),
        "per_second": count / seen.wall,
        "cpu_ms": None if cpu is None else 1e3 * cpu / count,
    }


def _medians(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    told = dict(rows[0])
    for name in ("first_p50", "first_p99", "added_p50", "added_p99", "per_second", "cpu_ms"):
        if told[name] is not None:
            told[name] = round(median(row[name] for row in rows), 3)
    told["per_core_second"] = round(1e3 / told["cpu_ms"], 1) if told["cpu_ms"] else None
    return told


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("proxy", __doc__)
    names = ["kv-offload", "sequential", "vllm-router", "toy-like"]
    shown = ",".join(names)
    parser.add_argument(
        "--proxy", type=one_of(names), default=tuple(names), metavar="NAME,...", help=f"default: {shown}"
    )
    parser.add_argument("--toy", type=Path, metavar="FILE", help="toy_proxy_server.py of a checkout of vLLM")
    add_numbers(
        parser,
        ("short", 200, "tokens of a short prompt"),
        ("long", 100_000, "tokens of a long prompt"),
        ("requests", 400, "of a turn, with short prompts"),
        ("requests-long", 64, "of a turn, with long prompts"),
        ("rounds", 3, "turns of each, after one that does not count"),
        ("requests-after", 200, "after the death of an engine"),
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
