"""``vllm serve`` with the tests' model and sizes, and what tests ask of it."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from offload.testing.engines.server import START_SECONDS, ServerProcess
from tests.engine.answers import BLOCK_SIZE
from tests.engine.engine import MAX_MODEL_LEN, model_directory

VOCAB_SIZE = 512
"""Of the served model, which has a tokenizer."""

SIZES = {
    "--dtype": "float32",
    "--block-size": BLOCK_SIZE,
    "--num-gpu-blocks-override": 49,
    "--max-model-len": MAX_MODEL_LEN,
}
_SHARED_MEMORY = Path("/dev/shm")


def served_model() -> Path:
    """Its directory."""
    return model_directory(vocab_size=VOCAB_SIZE, with_tokenizer=True)


class VllmServer(ServerProcess):
    """A server with our connector, and the log line of statistics every second."""

    def __init__(self, directory: Path, extra_config: Mapping[str, Any]) -> None:
        """Its log goes into ``directory``, an empty one."""
        self.extra_config = extra_config
        super().__init__(directory, served_model(), SIZES, extra_config, {"VLLM_LOG_STATS_INTERVAL": "1"})

    def complete(self, prompt: list[int] | str) -> dict[str, Any]:
        """Tokens and their log-probabilities from ``/v1/completions``."""
        body = {
            "prompt": prompt,
            "temperature": 0,
            "max_tokens": 4,
            "ignore_eos": True,
            "logprobs": 5,
            "return_token_ids": True,
        }
        with self.http.open("/v1/completions", body) as response:
            choice = json.load(response)["choices"][0]
        return {name: choice[name] for name in ("token_ids", "logprobs")}

    @contextmanager
    def streaming(self, prompt: list[int], max_tokens: int) -> Iterator[None]:
        """Inside, an answer is under way; afterwards its client is gone, which aborts the request."""
        body = {"prompt": prompt, "max_tokens": max_tokens, "stream": True, "ignore_eos": True}
        connection = HTTPConnection("127.0.0.1", self.port, timeout=START_SECONDS)
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        try:
            with connection.getresponse() as response:
                assert response.status == 200
                assert response.readline().startswith(b"data:")
                yield
        finally:
            connection.close()

    def shared_memory(self) -> set[Path]:
        """Files below /dev/shm that its processes have open or mapped."""
        found: set[Path] = set()
        for pid in self.processes():
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                path = line.partition("/")
                found.add(Path("/" + path[2]))
            for link in Path(f"/proc/{pid}/fd").iterdir():
                try:
                    found.add(link.readlink())
                except FileNotFoundError:
                    continue
        return {path for path in found if _SHARED_MEMORY in path.parents}
