"""The benchmark of proxies: what its engines answer, whom it counts, and all of it once."""

import asyncio
from pathlib import Path

import pytest

from benchmarks.proxy import __main__ as proxy
from benchmarks.proxy.canned import CHUNKS
from benchmarks.proxy.dying import answered_after_a_death
from benchmarks.proxy.load import body_of, load, num_prefilled
from offload.testing.proxies import kv_offload_proxy, toy_like
from offload.testing.proxies.process import PORT, ProxyProcess
from tests.benchmarks.conftest import Refusal, Run


def test_a_request_has_so_many_tokens() -> None:
    body = body_of(5) % 7
    assert body == b'{"model":"model","prompt":[7,101,102,103,104],"max_tokens":%d,"stream":true}' % CHUNKS


def test_engines_that_compute_nothing_answer_all() -> None:
    async def ask() -> tuple[int, int, int]:
        async with ProxyProcess("engine", ["-m", "benchmarks.proxy.canned", "--port", PORT]) as engine:
            seen = await load([engine.url, engine.url], body_of(300), 20, 4)
            return len(seen.first), seen.failed, await num_prefilled([engine.url])

    assert asyncio.run(ask()) == (20, 0, 20)


def test_an_answer_that_is_not_whole_is_counted() -> None:
    async def ask() -> int:
        async with ProxyProcess("engine", ["-m", "benchmarks.proxy.canned", "--port", PORT]) as engine:
            one = body_of(3).replace(b'"stream":true', b'"stream":false')
            return (await load([engine.url], one, 5, 2)).failed

    assert asyncio.run(ask()) == 5


@pytest.mark.parametrize(("start", "share"), [(kv_offload_proxy, 1.0), (toy_like, None)])
def test_whom_a_dead_engine_concerns(start: proxy.Start, share: float | None) -> None:
    told = asyncio.run(answered_after_a_death("it", start, 24))
    assert told["answered"] == share if share else told["answered"] < 0.7


def test_a_router_that_is_not_there_is_refused(refusal: Refusal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proxy, "has_vllm_router", lambda: False)
    assert ".ci/setup-router" in refusal(proxy, "--proxy", "vllm-router")


def test_all_of_it_once(run: Run, tmp_path: Path) -> None:
    sizes = {"short": 8, "long": 300, "requests": 8, "requests-long": 4, "rounds": 1, "requests-after": 8}
    options = [part for name, value in sizes.items() for part in (f"--{name}", str(value))]
    ran = run(proxy, "--proxy", "kv-offload,sequential,toy-like", *options)
    rows = [row for row in ran.rows if "prompt_tokens" in row]
    assert len(rows) == 2 * 2 * 4
    assert all(row["prefilled"] == 1 for row in rows if row["proxy"] != "direct")
    assert [row["answered"] for row in ran.rows if row["proxy"] == "kv-offload" and "answered" in row] == [1]
