"""The online benchmark: the same workload against a running `vllm serve` (or what speaks like it)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from typing import Any

from tqdm import tqdm

from benchmarks.long_document_qa.client import Client
from benchmarks.long_document_qa.measure import Counters, measure
from benchmarks.long_document_qa.settings import Workload
from benchmarks.long_document_qa.workload import Prompt, warm_up_prompts
from offload.testing.engines.client import HttpServer

__all__ = ["Server", "run_server"]


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
        self._http = HttpServer(base_url, api_key)
        self.model = model or self._http.first_model()

    def counters(self) -> Counters:
        return Counters.read(self._http.metrics().items())

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
        body = {"model": self.model, "prompt": prompt.tolist(), "max_tokens": output_tokens}
        return self._http.first_token(body)


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
