"""Servers that hand KV to each other, the proxy before them, and what tests ask of both."""

import json
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np

from offload.testing.engines.client import HttpServer
from offload.testing.engines.server import ServerProcess, held_port
from offload.testing.proxies import kv_offload_proxy
from tests.engine.answers import BLOCK_BYTES, BLOCK_SIZE, TOLERANCE, Prompt
from tests.engine.server import VOCAB_SIZE

NUM_BLOCKS = 40
NUM_TOKENS = NUM_BLOCKS * BLOCK_SIZE + 11
"""Of a prompt."""
WHOLE = NUM_BLOCKS * BLOCK_SIZE
"""Of these, what can be handed over."""
PATIENCE = 60
"""``peer_wait_seconds``, however busy this machine is."""
PEERS = "peers_to_pool"
"""The route of fetches from peers."""

_NEVER_ILL = ("--health-seconds", "3600")
"""Options of a proxy: engines that are stopped for a while, or are slow, are not ill."""

_WAIT_SECONDS = 120.0


def prompt_of(seed: int, num_tokens: int = NUM_TOKENS) -> Prompt:
    """Unlike seeds share no block."""
    tokens: Prompt = np.random.default_rng(seed).integers(4, VOCAB_SIZE, num_tokens).tolist()
    return tokens


def body_of(prompt: Prompt, **said: Any) -> dict[str, Any]:
    """Of a request for a few tokens, whatever they are."""
    return {
        "prompt": prompt,
        "temperature": 0,
        "max_tokens": 4,
        "ignore_eos": True,
        "return_token_ids": True,
        **said,
    }


def ask(http: HttpServer, prompt: Prompt, **said: Any) -> dict[str, Any]:
    """One answer: its choice, with token ids and log-probabilities."""
    with http.open("/v1/completions", body_of(prompt, **{"logprobs": 5, **said})) as response:
        return dict(json.load(response)["choices"][0])


def cold(http: HttpServer, prompt: Prompt, **said: Any) -> dict[str, Any]:
    """The same, of an engine that finds nothing: no other prompt has that salt."""
    return ask(http, prompt, cache_salt=f"cold {time.monotonic_ns()}", **said)


def stream(
    http: HttpServer, prompt: Prompt, seen: Callable[[list[int]], None] = lambda tokens: None, **said: Any
) -> list[int]:
    """Token ids of an answer that streams; ``seen`` is called with those so far, at each event.

    An event with an error fails the test.
    """
    tokens: list[int] = []
    with http.open("/v1/completions", body_of(prompt, stream=True, **said)) as response:
        for line in response:
            if line.startswith(b"data:") and line[5:].strip() != b"[DONE]":
                event = json.loads(line[5:])
                assert "error" not in event, event
                for choice in event["choices"]:
                    tokens += choice.get("token_ids") or []
                seen(tokens)
    return tokens


class Asking:
    """A request under way, on a thread of its own."""

    def __init__(self, http: HttpServer, prompt: Prompt, **said: Any) -> None:
        self._found: list[dict[str, Any] | Exception] = []
        self._thread = threading.Thread(target=self._ask, args=(http, prompt, said), daemon=True)
        self._thread.start()

    def _ask(self, http: HttpServer, prompt: Prompt, said: dict[str, Any]) -> None:
        try:
            self._found.append(ask(http, prompt, **said))
        except Exception as error:
            self._found.append(error)

    def answer(self) -> dict[str, Any]:
        """Wait for it. Raises what went wrong."""
        self._thread.join(_WAIT_SECONDS)
        assert self._found, "the request is stuck"
        [found] = self._found
        if isinstance(found, Exception):
            raise found
        return found


def total(servers: Iterable[ServerProcess], name: str) -> float:
    """Of a counter, on all of them."""
    return sum(server.http.metrics()[f"vllm:{name}"] for server in servers)


def labelled(http: HttpServer, name: str, label: str) -> float:
    """Of the samples of a counter that have this label, such as ``route="gpu_to_pool"``."""
    with http.open("/metrics") as response:
        page = response.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in page if line.startswith(f"{name}{{") and label in line)


def computed(servers: Iterable[ServerProcess]) -> int:
    """Prompt tokens that these engines have computed."""
    servers = list(servers)
    return int(total(servers, "prompt_tokens") - total(servers, "prompt_tokens_cached"))


def moved_bytes(servers: Iterable[ServerProcess], route: str) -> int:
    """Along a route."""
    name = "vllm:cpu_offload_route_bytes_total"
    return int(sum(labelled(server.http, name, f'route="{route}"') for server in servers))


def fetched_bytes(servers: Iterable[ServerProcess]) -> int:
    """From peers into the pools of these engines."""
    return moved_bytes(servers, PEERS)


class Handed:
    """What has come to engines along a route, and what they have computed, since this was made."""

    def __init__(self, servers: Iterable[ServerProcess], route: str = PEERS) -> None:
        self._servers, self._route = list(servers), route
        self._before = self._now()

    @property
    def num_computed(self) -> int:
        """Prompt tokens."""
        return self._now()[0] - self._before[0]

    @property
    def num_fetched(self) -> int:
        """Blocks that have come."""
        num_blocks, rest = divmod(self._now()[1] - self._before[1], BLOCK_BYTES)
        assert not rest, "part of a block"
        return num_blocks

    def _now(self) -> tuple[int, int]:
        return computed(self._servers), moved_bytes(self._servers, self._route)


def assert_same(found: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """The same tokens, with log-probabilities as near as those of a cold run."""
    assert found["token_ids"] == expected["token_ids"]
    pairs = zip(found["logprobs"]["token_logprobs"], expected["logprobs"]["token_logprobs"], strict=True)
    assert max(abs(one - other) for one, other in pairs) < TOLERANCE


def wait_for(is_so: Callable[[], bool], what: str) -> None:
    """Look again and again. AssertionError with ``what`` after two minutes."""
    until = time.monotonic() + _WAIT_SECONDS
    while not is_so():
        assert time.monotonic() < until, what
        time.sleep(0.02)


def proxied(
    stack: ExitStack,
    *options: str,
    prefill: Sequence[ServerProcess] = (),
    decode: Sequence[ServerProcess] = (),
    both: Sequence[ServerProcess] = (),
) -> tuple[HttpServer, "Admin"]:
    """A proxy before these servers, once they answer, and its admin endpoints."""
    port = stack.enter_context(held_port()).getsockname()[1]
    admin = ("--admin-port", str(port))
    urls = [[server.ready().http.base_url for server in servers] for servers in (prefill, decode, both)]
    of_both = [part for url in urls.pop() for part in ("--both", url)]
    proxy = kv_offload_proxy(*urls, [*_NEVER_ILL, *options, *admin, *of_both])
    stack.enter_context(proxy.running())
    return HttpServer(proxy.url), Admin(HttpServer(f"http://127.0.0.1:{port}"))


class Admin:
    """The proxy's admin endpoints."""

    def __init__(self, http: HttpServer) -> None:
        self._http = http

    def engines(self) -> dict[str, dict[str, Any]]:
        """What it says of each, by URL."""
        with self._http.open("/engines") as response:
            return {told["url"]: told for told in json.load(response)["engines"]}

    def tell(self, path: str, **fields: Any) -> None:
        """POST."""
        with self._http.open(path, fields) as response:
            assert response.status == 200

    def count(self, name: str, label: str) -> float:
        """Of the proxy's counters."""
        return labelled(self._http, f"kv_offload_proxy_{name}_total", label)
