"""How much of what a real server computes is stored, and what that costs the next request.

    python -m benchmarks.served_share [--json FILE]

One `vllm serve` runs a small Llama of random weights on the CPU backend. Its GPU cache has 128 blocks of 32
tokens, an eighth of which a step computes. Prompts of token ids, none like another, in a pool larger than all
of them. All is asked twice: with copies as fast as this machine makes them, and with paced ones. A paced copy
takes at least four steps that compute. Beside that, the link carries KV eight times as fast as the model
computes it, which is measured first.

Per row: prompt length as a share of the GPU cache, tokens to generate, requests at once, and when the next
request comes. That is after all copies have ended, or as soon as another request has ended. Then

- stored: the share of full blocks that is in the pool at the end; all, where requests come after the copies.
- not stored: blocks, by reason.
- first token: mean seconds to it of requests that came after others; longest beside it in the JSON.
- without: the same for requests that say `"cpu_offload_store": false`, asked of the same server in turns. The
  difference is what held blocks and copies of the requests before cost. Where there are none any more (after
  the copies) it is the measurement's noise.
"""

from __future__ import annotations

import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from benchmarks.common import report
from benchmarks.common.arguments import parser_of, positive
from benchmarks.common.paced_worker import PACE, write_pace
from benchmarks.common.prompts import draw_tokens
from benchmarks.common.tables import Column, table
from offload.testing.copiers.paced import Pace
from offload.testing.engines.models import kv_bytes_per_token, tiny_llama
from offload.testing.engines.server import ServerProcess

__all__ = ["main"]

_BLOCK = 32
_BLOCKS = 128
_CACHE_TOKENS = _BLOCK * _BLOCKS
_STEP_TOKENS = _CACHE_TOKENS // 8
_MODEL = {"hidden_size": 128, "layers": 2, "heads": 4, "kv_heads": 1}
_VOCABULARY = 512
_FASTER = 8
"""Than the model computes KV, a paced link carries it."""
_COPY_STEPS = 4
"""That a paced copy takes at least."""
_ROUNDS = 2
_SETTLE_SECONDS = 300.0
_OURS = "vllm:cpu_offload_"
_UNSTORED = f"{_OURS}unstored_blocks_"
_NO_STORE = {"kv_transfer_params": {"cpu_offload_store": False}}


_COLUMNS = (
    Column("copies", "copies"),
    Column("prompt", lambda row: f"{row['prompt_sixteenths']}/16"),
    Column("answer", "answer_tokens"),
    Column("at once", "at_once"),
    Column("next comes", lambda row: "after the copies" if row["rested"] else "at once"),
    Column("stored", "share", ".1%"),
    Column("not stored", lambda row: ", ".join(f"{n} {name}" for name, n in row["unstored"].items()) or None),
    Column("first token", "first_mean", ".3f"),
    Column("without", "first_mean_without", ".3f"),
    Column("ratio", lambda row: f"{row['first_mean'] / row['first_mean_without']:.2f}x"),
)


class Scene(NamedTuple):
    """What is asked. `rested`: a request comes after the copies before it."""

    prompt_sixteenths: int
    answer_tokens: int
    at_once: int
    rested: bool

    @property
    def prompt_tokens(self) -> int:
        """Of each prompt."""
        return self.prompt_sixteenths * _CACHE_TOKENS // 16

    @property
    def full_blocks(self) -> int:
        """That each request computes; the last token of an answer is not computed."""
        return (self.prompt_tokens + self.answer_tokens - 1) // _BLOCK

    @property
    def num_requests(self) -> int:
        """In one round: the first ones, and as many again that come after others, or four."""
        return self.at_once + max(4, self.at_once)


class Asker:
    """Asks a server prompts that are new each time."""

    def __init__(self, server: ServerProcess) -> None:
        self._http = server.http
        self._rng = random.Random(0)

    def ask(self, num_tokens: int, answer_tokens: int, is_stored: bool) -> float:
        """Ask one prompt; returns seconds to the first token."""
        return self._ask(self._prompt(num_tokens), answer_tokens, is_stored)

    def serve(self, scene: Scene, is_stored: bool) -> list[float]:
        """Ask all requests of a scene; returns seconds to the first token of those that came after others."""
        prompts = [self._prompt(scene.prompt_tokens) for _ in range(scene.num_requests)]
        size = scene.at_once if scene.rested else len(prompts)
        first: list[float] = []
        with ThreadPoolExecutor(scene.at_once) as pool:
            for start in range(0, len(prompts), size):
                wave = prompts[start : start + size]
                first += pool.map(lambda prompt: self._ask(prompt, scene.answer_tokens, is_stored), wave)
                if scene.rested:
                    self.settle()
        return first[scene.at_once :]

    def settle(self) -> dict[str, float]:
        """Wait until nothing is in flight or queued; returns the metrics, which come along with answers."""
        deadline = time.monotonic() + _SETTLE_SECONDS
        while time.monotonic() < deadline:
            self._ask([5] * 8, 1, is_stored=True)  # shorter than a block, so nothing of it is stored
            metrics = self._http.metrics()
            if not metrics.get(f"{_OURS}jobs_in_flight") and not metrics.get(f"{_OURS}queued_blocks"):
                return metrics
            time.sleep(0.02)
        raise RuntimeError(f"copies have not ended after {_SETTLE_SECONDS:.0f} s")

    def _ask(self, prompt: Sequence[int], answer_tokens: int, is_stored: bool) -> float:
        body = {"prompt": prompt, "max_tokens": answer_tokens, **({} if is_stored else _NO_STORE)}
        return self._http.first_token(body)

    def _prompt(self, length: int) -> list[int]:
        return draw_tokens(self._rng, length, _VOCABULARY, first=4)  # after those with a meaning


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print a table, write JSON if asked; return the exit status."""
    parser = parser_of("served_share", __doc__)
    for name, default, what in (
        ("sixteenths", [1, 4, 8, 15], "prompts, in 1/16 of the cache"),
        ("answers", [1, 64], "tokens to generate"),
        ("at-once", [1, 8], "requests at once"),
    ):
        parser.add_argument(f"--{name}", type=positive, nargs="+", default=default, help=what)
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the server ends with this process
    scenes = list(_scenes(options.sixteenths, options.answers, options.at_once))
    meta = report.meta(settings={"model": _MODEL, "faster": _FASTER, "copy_steps": _COPY_STEPS})
    meta["notes"] = report.load_note()
    print("starting a server ...", file=sys.stderr, flush=True)
    rows = []
    for row in _rows(scenes, meta):
        rows.append(row)
        if options.json:
            report.write_json(options.json, meta, rows)
    print(table(_COLUMNS, rows))
    rested = [row["share"] for row in rows if row["rested"]]
    whole = sum(share == 1.0 for share in rested)
    print(f"where requests come after the copies, all is stored in {whole} of {len(rested)} rows")
    return 0


def _scenes(lengths: Sequence[int], answers: Sequence[int], at_once: Sequence[int]) -> Iterator[Scene]:
    """Where not all that are sent at once fit the cache, some come before the copies of others have ended."""
    for length, answer, many, rested in product(lengths, answers, at_once, (True, False)):
        scene = Scene(length, answer, many, rested)
        if not rested or many * (scene.full_blocks + 1) < _BLOCKS:
            yield scene


def _rows(scenes: Sequence[Scene], meta: dict[str, Any]) -> Iterator[dict[str, Any]]:
    with tempfile.TemporaryDirectory() as name:
        file = Path(name) / "pace"
        write_pace(file, Pace(float("inf")))
        (folder := Path(name) / "server").mkdir()
        with _server(folder, file) as server:
            asker = Asker(server.ready())
            paces = {"as they come": Pace(float("inf")), "paced": _pace(asker)}
            meta["pace"] = paces["paced"]._asdict()
            bar = tqdm(total=len(scenes) * len(paces), unit="row")
            for copies, pace in paces.items():
                write_pace(file, pace)
                for scene in scenes:
                    yield {"copies": copies, **scene._asdict(), **_measure(asker, scene)}
                    bar.update()
            bar.close()


def _server(folder: Path, pace: Path) -> ServerProcess:
    model = tiny_llama(
        **_MODEL, vocab_size=_VOCABULARY, max_position_embeddings=_CACHE_TOKENS, with_tokenizer=True
    )
    flags = {
        "--dtype": "float32",
        "--block-size": _BLOCK,
        "--num-gpu-blocks-override": _BLOCKS,
        "--max-num-batched-tokens": _STEP_TOKENS,
        "--max-model-len": _CACHE_TOKENS - _BLOCK,
        "--worker-extension-cls": "benchmarks.common.paced_worker.PacedWorker",
    }
    return ServerProcess(folder, model, flags, {"cpu_gib": 2}, {PACE: str(pace)})


def _pace(asker: Asker) -> Pace:
    """The pace of paced copies, by how fast the model computes; the first of these requests warm it up."""
    num_tokens = 6 * _STEP_TOKENS
    seconds = min(asker.ask(num_tokens, 1, is_stored=False) for _ in range(6)) / num_tokens
    token_bytes = kv_bytes_per_token(**_MODEL, dtype_bytes=4)
    return Pace(round(_FASTER * token_bytes / seconds), round(_COPY_STEPS * _STEP_TOKENS * seconds, 4))


def _measure(asker: Asker, scene: Scene) -> dict[str, Any]:
    first: dict[bool, list[float]] = {True: [], False: []}
    before = asker.settle()
    for _ in range(_ROUNDS):
        for is_stored, seconds in first.items():
            seconds += asker.serve(scene, is_stored)
            after = asker.settle()
    full = _ROUNDS * scene.num_requests * scene.full_blocks
    unstored = {
        name.removeprefix(_UNSTORED): int(after[name] - before.get(name, 0.0))
        for name in after
        if name.startswith(_UNSTORED) and not name.endswith("_created")
    }
    used = f"{_OURS}pool_used_blocks"
    return {
        "requests": _ROUNDS * scene.num_requests,
        "full_blocks": full,
        "share": (after[used] - before.get(used, 0.0)) / full,
        "unstored": {name: num for name, num in unstored.items() if num},
        "first_mean": _mean(first[True]),
        "first_longest": round(max(first[True]), 4),
        "first_mean_without": _mean(first[False]),
        "first_longest_without": round(max(first[False]), 4),
    }


def _mean(values: Sequence[float]) -> float:
    return round(sum(values) / len(values), 4)


if __name__ == "__main__":
    raise SystemExit(main())
