"""The online benchmark: the same workload against a running `vllm serve` (or what speaks like it)."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from http.client import HTTPResponse
from typing import Any

from tqdm import tqdm

from benchmarks.longdoc.client import Client
from benchmarks.longdoc.measure import Counters, measure
from benchmarks.longdoc.settings import Workload
from benchmarks.longdoc.workload import Prompt, warm_up_prompts

__all__ = ["Server", "ServerError", "run_server"]

_REQUEST_SECONDS = 600.0


class ServerError(RuntimeError):
    """The server cannot be reached or refuses; the message names the address and its answer."""


class Server(Client):
    """Asks over HTTP: `/v1/completions` with token ids, streaming; counters from `/metrics`.

    Args:
        workload: what is asked.
        base_url: such as http://localhost:8000, without `/v1`.
        model: served model; None takes the first that the server lists.
        api_key: sent as bearer token, if any.
    """

    def __init__(
        self, workload: Workload, base_url: str, model: str | None = None, api_key: str | None = None
    ) -> None:
        super().__init__(workload)
        self._base_url = base_url.rstrip("/").removesuffix("/v1")
        self._headers = {"Content-Type": "application/json"}
        if api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self.model = model or self._first_model()

    def counters(self) -> Counters:
        with self._open("/metrics") as response:
            return Counters.read(_samples(response.read().decode().splitlines()))

    def ask(self, prompts: Sequence[Prompt], output_tokens: int, on_done: Callable[[], None]) -> list[float]:
        ttft = []
        with ThreadPoolExecutor(self.workload.concurrency) as pool:
            futures = [pool.submit(self._ask_one, prompt, output_tokens) for prompt in prompts]
            try:
                for future in as_completed(futures):
                    ttft.append(future.result())
                    on_done()
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        return ttft

    def _ask_one(self, prompt: Prompt, output_tokens: int) -> float:
        """Ask one prompt to its end; return seconds to its first token."""
        body = {
            "model": self.model,
            "prompt": prompt.tolist(),
            "max_tokens": output_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
        }
        sent_at = time.perf_counter()
        first_at = None
        with self._open("/v1/completions", body) as response:
            for line in response:
                if not line.startswith(b"data:") or line[5:].strip() == b"[DONE]":
                    continue
                event = json.loads(line[5:])
                if "error" in event:
                    raise ServerError(f"{self._base_url}: {event['error']}")
                if first_at is None and event.get("choices"):
                    first_at = time.perf_counter()
        if first_at is None:
            raise ServerError(f"{self._base_url}: the answer had no token")
        return first_at - sent_at

    def _first_model(self) -> str:
        with self._open("/v1/models") as response:
            models = json.load(response)["data"]
        if not models:
            raise ServerError(f"{self._base_url}/v1/models lists no model; name one with --model")
        return str(models[0]["id"])

    def _open(self, path: str, body: dict[str, Any] | None = None) -> HTTPResponse:
        data = None if body is None else json.dumps(body).encode()
        try:
            request = urllib.request.Request(self._base_url + path, data, self._headers)
            response = urllib.request.urlopen(request, timeout=_REQUEST_SECONDS)
        except urllib.error.HTTPError as error:
            detail = error.read().decode(errors="replace")[:500]
            raise ServerError(f"{self._base_url}{path} answered {error.code}: {detail}") from error
        except (OSError, ValueError) as error:
            raise ServerError(f"cannot reach {self._base_url}{path}: {error}") from error
        assert isinstance(response, HTTPResponse)
        return response


def run_server(server: Server, label: str) -> list[dict[str, Any]]:
    """Measure a running server; returns one row per document count and pass, with `label` as the mode.

    Its caches cannot be dropped from here, but documents differ between counts and seeds. Before the
    measurement it is asked about as many other documents as there are requests in flight.
    """
    workload = server.workload
    warm_up = warm_up_prompts(workload, workload.concurrency)
    rows: list[dict[str, Any]] = []
    total = sum(workload.documents) * workload.passes + len(warm_up)
    with tqdm(total=total, unit="request", desc=f"{label:8} warm-up", dynamic_ncols=True) as bar:
        server.run_round(warm_up, bar.update)
        for documents in workload.documents:
            bar.set_description(f"{label:8} {documents} documents")
            rows += measure(partial(server.run_round, on_done=bar.update), workload, documents, label)
    return rows


def _samples(lines: Iterable[str]) -> Iterable[tuple[str, float]]:
    """Parse Prometheus text as far as needed: (name without `_total`, value) of every counter sample."""
    for line in lines:
        name, _, rest = line.partition("{")
        name, _, bare = name.partition(" ")
        value = rest.rpartition("}")[2] if rest else bare
        if name.endswith("_total") and value.strip():
            yield name.removesuffix("_total"), float(value.split()[0])
