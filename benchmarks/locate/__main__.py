"""What does it cost to know how much of a prompt an engine has, and do running answers wait for it?

    python -m benchmarks.locate [--tokens 1000 8000 32000] [--prompts 8] [--seconds 5] [--json FILE]

A real vLLM server on the CPU backend, of one small model with random weights. Its pool has prompts of several
lengths. A prefix-aware proxy asks two things about a prompt of text: the token ids, at `/tokenize`, which is
answered by the API server; and how many of them the pool has, which is answered beside the scheduler, in the
same process. Both are asked here as the proxy asks them. *First* is a prompt's first question: its hashes are
made. *Again* is the second: they are kept. Elapsed milliseconds, medians over prompts.

Then an answer runs. *Between tokens* is the time from one of its tokens to the next, while nobody asks, and
while questions follow each other without a pause: prompts that nobody had, or prompts of the pool, again.
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
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

from benchmarks.common import report
from benchmarks.common.arguments import add_numbers, parser_of, settings_of
from benchmarks.common.prompts import draw_tokens
from benchmarks.common.servers import Servers
from benchmarks.common.tables import Column, table
from offload.peering.locating import ask, ask_in, question_of
from offload.testing.engines.client import HttpServer
from offload.worker.peers.link import SocketLink, dial, run

__all__ = ["main"]

_BLOCK = 32
_VOCABULARY = 512
_ANSWER = 512
"""Tokens of the running answer."""
_PROMPT_COLUMNS = (
    Column("prompt tokens", "tokens", ",d"),
    Column("tokenize, ms", "tokenize_ms", ".2f"),
    Column("KiB of ids", "ids_kib", ".0f"),
    Column("located first, ms", "first_ms", ".2f"),
    Column("again, ms", "again_ms", ".2f"),
    Column("computed, ms", "computed_ms", ".0f"),
)
_RUNNING_COLUMNS = (
    Column("while", "while"),
    Column("questions/s", "questions", ",.0f"),
    Column("between tokens: p50 ms", "between_p50_ms", ".2f"),
    Column("p99 ms", "between_p99_ms", ".2f"),
)


class _Engine(NamedTuple):
    http: HttpServer
    link: SocketLink

    def located(self, token_ids: Sequence[int]) -> int:
        """Leading tokens of that prompt that the pool has."""
        return run(ask(question_of(token_ids)), self.link).num_tokens


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and print its tables; returns the exit code."""
    parser = parser_of("locate", __doc__)
    parser.add_argument(
        "--tokens",
        type=int,
        nargs="+",
        default=[1000, 8000, 32000],
        metavar="N",
        help="of a prompt (default: 1000 8000 32000)",
    )
    add_numbers(
        parser,
        ("prompts", 8, "of each length"),
        ("seconds", 5, "in which questions follow each other"),
    )
    options = parser.parse_args(argv)
    notes = report.load_note()
    rng = random.Random(0)
    with _started(options) as engine:
        prompts = {
            size: [draw_tokens(rng, size, _VOCABULARY, first=3) for _ in range(options.prompts)]
            for size in options.tokens
        }
        rows = [_prompt_row(engine, size, each) for size, each in prompts.items()]
        rest = prompts[max(options.tokens)][0][_BLOCK:]
        held = itertools.cycle(prompts[max(options.tokens)])
        askers: dict[str, Callable[[], object] | None] = {
            "nobody asks": None,
            "new prompts": lambda: engine.located([*draw_tokens(rng, _BLOCK, _VOCABULARY, 3), *rest]),
            "prompts of the pool": lambda: engine.located(next(held)),
        }
        running = [_running_row(engine, name, each, options.seconds) for name, each in askers.items()]
    print(table(_PROMPT_COLUMNS, rows))
    print(table(_RUNNING_COLUMNS, running))
    for note in notes:
        print(note)
    report.write(options.json, [*rows, *running], settings=settings_of(options), notes=notes)
    return 0


@contextlib.contextmanager
def _started(options: argparse.Namespace) -> Iterator[_Engine]:
    longest = max(options.tokens) + _ANSWER + 64
    with Servers(
        longest,
        block=_BLOCK,
        vocabulary=_VOCABULARY,
        step_tokens=2048,
        gpu_tokens=2 * longest,
        hidden_size=64,
        layers=2,
        heads=2,
    ) as started:
        port = started.port()
        server = started.start("engine", {"cpu_gib": 1, "listen": f"127.0.0.1:{port}"})
        http = server.ready().http
        link = dial("127.0.0.1", port)
        try:
            run(ask_in(b""), link)
            yield _Engine(http, link)
        finally:
            link.close()


def _prompt_row(engine: _Engine, size: int, prompts: Sequence[list[int]]) -> dict[str, Any]:
    computed = [engine.http.first_token({"prompt": prompt, "max_tokens": 1}) for prompt in prompts]
    texts = [_asked(engine.http, "/detokenize", {"tokens": prompt})["prompt"] for prompt in prompts]
    tokenized: list[float] = []
    answers = []
    for text in texts:
        began = time.perf_counter()
        answers.append(_asked(engine.http, "/tokenize", {"prompt": text, "add_special_tokens": False}))
        tokenized.append(time.perf_counter() - began)
    located: list[list[float]] = []
    whole = size // _BLOCK * _BLOCK
    for _ in range(2):
        located.append([])
        for prompt in prompts:
            began = time.perf_counter()
            found = engine.located(prompt)
            located[-1].append(time.perf_counter() - began)
            assert found == whole, f"{found} of {size} tokens are in the pool"
    return {
        "tokens": size,
        "tokenized": int(statistics.median(answer["count"] for answer in answers)),
        "tokenize_ms": 1e3 * statistics.median(tokenized),
        "ids_kib": statistics.median(len(json.dumps(answer["tokens"])) for answer in answers) / 1024,
        "first_ms": 1e3 * statistics.median(located[0]),
        "again_ms": 1e3 * statistics.median(located[1]),
        "computed_ms": 1e3 * statistics.median(computed),
    }


def _asked(http: HttpServer, path: str, body: dict[str, Any]) -> dict[str, Any]:
    with http.open(path, body) as response:
        return dict(json.load(response))


def _running_row(
    engine: _Engine, name: str, asker: Callable[[], object] | None, seconds: float
) -> dict[str, Any]:
    """Answers run one after the other for so long, and questions beside them."""
    is_over = threading.Event()
    num_asked = 0

    def go_on() -> None:
        nonlocal num_asked
        assert asker is not None
        while not is_over.is_set():
            asker()
            num_asked += 1

    thread = threading.Thread(target=go_on)
    if asker is not None:
        thread.start()
    began, between = time.perf_counter(), []
    while time.perf_counter() < began + seconds:
        times = _token_times(engine.http)
        between += [later - at for at, later in itertools.pairwise(times)]
    spent = time.perf_counter() - began
    is_over.set()
    if asker is not None:
        thread.join()
    parts = statistics.quantiles(between, n=100)
    return {
        "while": name,
        "questions": num_asked / spent,
        "between_p50_ms": 1e3 * parts[49],
        "between_p99_ms": 1e3 * parts[98],
        "tokens": len(between),
    }


def _token_times(http: HttpServer) -> list[float]:
    body = {"prompt": [5] * _BLOCK, "max_tokens": _ANSWER, "temperature": 0.0, "ignore_eos": True}
    times = []
    with http.open("/v1/completions", {**body, "stream": True}) as response:
        for line in response:
            if not line.startswith(b"data:") or line[5:].strip() == b"[DONE]":
                continue
            if json.loads(line[5:]).get("choices"):
                times.append(time.perf_counter())
    return times


if __name__ == "__main__":
    sys.exit(main())
