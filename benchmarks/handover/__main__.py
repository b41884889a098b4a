"""How soon does a decode engine have the first token of a prompt that a prefill engine computes?

    python -m benchmarks.handover [--tokens 500,1000,2000,4000,8000] [--rounds 7] [--nixl DIR] [--json FILE]

Real vLLM servers on the CPU backend, a prefill and a decode engine of ours and a pair with vLLM's
NixlConnector, all of one small model with random weights. Each prompt is new to all of them. The ways take
turns in each round, and the other pair is stopped meanwhile:

- *alone*: the decode engine computes the prompt itself;
- *one after the other*: the prefill engine answers, then the decode engine is asked with what it returned;
- *chunk by chunk*: both are asked at once, and the decode engine fetches what there is so far, in turns;
- *nixl*: one after the other, by NixlConnector.

Time to first token counts from the first question to either engine. The *hand-over* is what it takes beyond
the prefill engine's own answer to such a prompt. *Computed* is what the decode engine computed of the prompt.
Elapsed seconds, medians. NixlConnector needs the package `nixl`: installed, or in the directory of `--nixl`.

Workers are in the process of their scheduler, as on one GPU. With `--own-processes` they are not, as vLLM has
it on the CPU backend: there each of the two spins while it waits for the other, and takes a core for that.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import random
import signal
import statistics
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks.common import report
from benchmarks.common.arguments import add_numbers, parser_of, settings_of
from benchmarks.common.prompts import draw_tokens
from benchmarks.common.servers import Servers
from benchmarks.common.tables import Column, table
from offload.testing.engines.client import HttpServer
from offload.testing.engines.environment import environment_of
from offload.testing.engines.server import ServerProcess

__all__ = ["main"]

_BLOCK = 32
_VOCABULARY = 512
_WARM_UP = 2
"""Prompts of each length before those that count: connections are made, kernels are warm."""
_WHO = ("cpu_offload_from_v", "cpu_offload_from_peer", "cpu_offload_from_epoch")
ALONE, ONE_AFTER_THE_OTHER, CHUNK_BY_CHUNK, NIXL = "alone", "one after the other", "chunk by chunk", "nixl"


class _Asked(NamedTuple):
    """Seconds to the first token of a prompt, and those until the prefill engine had answered."""

    seconds: float
    prefill: float | None = None


class _Pair(NamedTuple):
    prefill: HttpServer
    decode: HttpServer
    servers: Sequence[ServerProcess]


class _Way(NamedTuple):
    """How a prompt is asked, who decodes it, and the servers that it takes."""

    ask: Callable[[list[int]], _Asked]
    decode: HttpServer
    servers: Sequence[ServerProcess]


def _handover_ms(row: Mapping[str, Any]) -> str | None:
    return None if row["handover"] is None else f"{1e3 * row['handover']:.0f}"


_COLUMNS = (
    Column("tokens", "tokens", ",d"),
    Column("way", "way"),
    Column("first token ms", lambda row: 1e3 * row["seconds"], ".0f"),
    Column("hand-over ms", _handover_ms),
    Column("computed", "computed", ",.0f"),
    Column("of alone", "of_alone", ".2f"),
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and print its table; returns the exit code."""
    parser = parser_of("handover", __doc__)
    parser.add_argument("--tokens", default="500,1000,2000,4000,8000", help="of prompts, with commas between")
    parser.add_argument("--nixl", help="a directory that has the package nixl")
    parser.add_argument("--own-processes", action="store_true", help="workers have processes of their own")
    add_numbers(parser, ("rounds", 7, "in which each way has its turn"), ("chunk", 1024, "tokens of a step"))
    options = parser.parse_args(argv)
    try:
        lengths = [int(part) for part in options.tokens.split(",")]
    except ValueError:
        parser.error(f"--tokens is {options.tokens!r}; give whole numbers with commas between")
    notes = report.load_note()
    has_nixl = options.nixl is not None or importlib.util.find_spec("nixl") is not None
    if not has_nixl:
        notes.append("the package nixl is not there, so NixlConnector was not measured")
    with _servers(max(lengths), options, has_nixl) as (ours, nixl):
        rows = _rows(lengths, options.rounds, _ways(ours, nixl))
    print(table(_COLUMNS, rows))
    for note in notes:
        print(note)
    report.write(options.json, rows, settings=settings_of(options), notes=notes)
    return 0


@contextlib.contextmanager
def _servers(
    longest: int, options: argparse.Namespace, has_nixl: bool
) -> Iterator[tuple[_Pair, _Pair | None]]:
    with Servers(
        longest + 64,
        block=_BLOCK,
        vocabulary=_VOCABULARY,
        step_tokens=options.chunk,
        gpu_tokens=3 * longest,
        is_one_process=not options.own_processes,
    ) as started:
        listen = f"127.0.0.1:{started.port()}"
        servers = [
            started.start("prefill", {"cpu_gib": 2, "role": "prefill", "listen": listen}),
            started.start(
                "decode", {"cpu_gib": 2, "role": "decode", "peers": [listen], "fetch_gpu_share": 1}
            ),
        ]
        if has_nixl:
            for name, role in (("nixl-prefill", "kv_producer"), ("nixl-decode", "kv_consumer")):
                config = {"kv_connector": "NixlConnector", "kv_role": role}
                variables = {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(started.port())}
                with environment_of({"PYTHONPATH": os.pathsep.join(_paths(options.nixl))}):
                    flags = {"--kv-transfer-config": json.dumps(config)}
                    servers.append(started.start(name, None, flags, variables))
        https = [server.ready().http for server in servers]
        try:
            yield _Pair(*https[:2], servers[:2]), _Pair(*https[2:], servers[2:]) if has_nixl else None
        finally:
            _signal(servers, signal.SIGCONT)


def _signal(servers: Sequence[ServerProcess], number: signal.Signals) -> None:
    for server in servers:
        server.signal(number, everyone=True)


def _paths(nixl: str | None) -> list[str]:
    return [path for path in (nixl, os.environ.get("PYTHONPATH")) if path]


def _ways(ours: _Pair, nixl: _Pair | None) -> dict[str, _Way]:
    known: dict[str, Any] = {}
    ways = {
        ALONE: _Way(
            lambda prompt: _decode(ours.decode, prompt, {}, time.perf_counter()), ours.decode, ours.servers
        ),
        ONE_AFTER_THE_OTHER: _Way(lambda prompt: _in_turn(ours, prompt, known), ours.decode, ours.servers),
        CHUNK_BY_CHUNK: _Way(lambda prompt: _at_once(ours, prompt, known), ours.decode, ours.servers),
    }
    if nixl is not None:
        ways[NIXL] = _Way(lambda prompt: _in_turn(nixl, prompt, {}), nixl.decode, nixl.servers)
    return ways


def _rows(lengths: Sequence[int], rounds: int, ways: Mapping[str, _Way]) -> list[dict[str, Any]]:
    rng = random.Random(0)
    rows: list[dict[str, Any]] = []
    for length in lengths:
        asked: dict[str, list[_Asked]] = defaultdict(list)
        computed: dict[str, list[float]] = defaultdict(list)
        for number in range(-_WARM_UP, rounds):
            for name, way in ways.items():
                _signal([each for other in ways.values() for each in other.servers], signal.SIGSTOP)
                _signal(way.servers, signal.SIGCONT)
                before = _computed(way.decode)
                found = way.ask(draw_tokens(rng, length, _VOCABULARY, first=3))
                if number >= 0:
                    asked[name].append(found)
                    computed[name].append(_computed(way.decode) - before)
        print(f"{length:,} tokens are measured", file=sys.stderr)
        prefill = statistics.median(each.prefill or 0.0 for each in asked[ONE_AFTER_THE_OTHER])
        alone = statistics.median(each.seconds for each in asked[ALONE])
        for name, found_ones in asked.items():
            seconds = [each.seconds for each in found_ones]
            own = [each.seconds - (each.prefill or prefill) for each in found_ones]
            rows.append(
                {
                    "tokens": length,
                    "way": name,
                    "seconds": statistics.median(seconds),
                    "handover": None if name == ALONE else statistics.median(own),
                    "computed": statistics.median(computed[name]),
                    "of_alone": statistics.median(seconds) / alone,
                    "all_seconds": seconds,
                }
            )
    return rows


def _in_turn(pair: _Pair, prompt: list[int], known: dict[str, Any]) -> _Asked:
    """The prefill engine, then the decode engine; ``known`` learns who the prefill engine is."""
    began = time.perf_counter()
    returned = _prefill(pair.prefill, prompt)
    known |= {key: returned[key] for key in _WHO if key in returned}
    prefill = time.perf_counter() - began
    return _decode(pair.decode, prompt, returned, began)._replace(prefill=prefill)


def _at_once(pair: _Pair, prompt: list[int], known: Mapping[str, Any]) -> _Asked:
    """Both at once: the decode engine is told that the prompt has been sent to the other."""
    began = time.perf_counter()
    prefill = threading.Thread(target=_prefill, args=(pair.prefill, prompt))
    prefill.start()
    asked = _decode(pair.decode, prompt, known, began)
    prefill.join()
    return asked


def _prefill(server: HttpServer, prompt: list[int]) -> dict[str, Any]:
    """Ask for one token; returns what is to be handed on."""
    params = {"do_remote_decode": True, "do_remote_prefill": False}
    body = {"prompt": prompt, "max_tokens": 1, "temperature": 0.0, "kv_transfer_params": params}
    with server.open("/v1/completions", body) as response:
        return dict(json.load(response).get("kv_transfer_params") or {})


def _decode(server: HttpServer, prompt: list[int], params: Mapping[str, Any], began: float) -> _Asked:
    """Ask for the first tokens; ``began``: when the first engine was asked."""
    before = time.perf_counter() - began
    return _Asked(
        before + server.first_token({"prompt": prompt, "max_tokens": 2, "kv_transfer_params": params})
    )


def _computed(server: HttpServer) -> float:
    """Prompt tokens that it has computed so far."""
    metrics = server.metrics()
    return metrics["vllm:prompt_tokens"] - metrics["vllm:prompt_tokens_cached"]


if __name__ == "__main__":
    raise SystemExit(main())
