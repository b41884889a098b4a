"""Policy ``prefix`` over real servers of pools that hash as vLLM does, and what it does where they fail."""

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, closing
from typing import Any

import numpy as np
from vllm import SamplingParams
from vllm.lora.request import LoRARequest
from vllm.utils.hashing import sha256_cbor
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.request import Request as VllmRequest

from offload.messages import Names
from offload.proxy.prefixes import PrefixPolicy
from offload.testing.upstream import Upstream
from offload.testing.upstream.words import encode, render
from offload.vllm.prompt_hashes import PromptHashes
from offload.worker.peers.locator import Locator
from tests.offload.proxy.kit import PROMPT, Stand, on_a_loop, stand, until
from tests.offload.proxy.test_admin import admin
from tests.offload.worker.peers.pools import KEY, PeerPool, contents

SLOT, BLOCK, LONG = 512, 16, {"locate_seconds": 30.0, "tokenize_seconds": 30.0}
CHAT = [{"role": "system", "content": PROMPT}, {"role": "user", "content": "go on"}]


def hashes(ids: Sequence[int], salt: str | None = None, adapter: tuple[str, str] | None = None) -> Names:
    """Of a prompt, as vLLM's scheduler makes them for a request."""
    init_none_hash(sha256_cbor)
    request = VllmRequest(
        "0",
        list(ids),
        SamplingParams(max_tokens=1),
        None,
        lora_request=LoRARequest(adapter[0], 3, adapter[1]) if adapter else None,
        cache_salt=salt,
        block_hasher=get_request_block_hasher(BLOCK, sha256_cbor),
    )
    return np.frombuffer(b"".join(request.block_hashes), dtype=np.uint8).reshape(-1, 32)


class Fleet:
    """A proxy in front of engines of both roles, and the pools that they show."""

    def __init__(self, stand: Stand, pools: Sequence[PeerPool]) -> None:
        self.stand = stand
        self.pools = pools

    async def goes_to(self, path: str = "/v1/completions", **body: Any) -> int:
        """Which engine answers."""
        before = [len(each.of(path)) for each in self.stand.decode]
        told = await self.stand.ask(path, max_tokens=1, **body)
        assert told.status == 200, told.body
        after = [len(each.of(path)) for each in self.stand.decode]
        [where] = [at for at, (old, new) in enumerate(zip(before, after, strict=True)) if new > old]
        return where

    def has(self, engine: int, ids: Sequence[int], *about: Any) -> None:
        """Its pool has that prompt from now on."""
        names = hashes(ids, *about)
        self.pools[engine].store(names, contents(len(names), SLOT))

    def located(self) -> dict[str, float]:
        return {each: self.stand.count("located", answers=each) for each in ("all", "some", "none")}

    def tokenized(self, how: str) -> float:
        return self.stand.count("tokenized", outcome=how)


@asynccontextmanager
async def fleet(count: int = 3, closed: Sequence[int] = (), **settings: Any) -> AsyncIterator[Fleet]:
    """So many engines; of those in ``closed`` the pools answer nobody."""
    pools = [PeerPool(512, SLOT, columns=1) for _ in range(count)]
    for each in pools:
        each.shown.locator = Locator(PromptHashes("sha256_cbor", BLOCK, BLOCK), 1, False)
    engines = [Upstream(f"d{number}", role="both") for number in range(count)]
    addresses = tuple((engine.url, pool.address) for engine, pool in zip(engines, pools, strict=True))
    for number in closed:
        pools[number].close()
    settings = {"fleet": addresses, "fleet_key": KEY, **LONG, **settings}
    async with stand(decode=engines, both=True, policy=PrefixPolicy(), **settings) as made:
        yield Fleet(made, pools)
    for number, each in enumerate(pools):
        if number not in closed:
            each.server.check_invariants()
            each.close()


@on_a_loop
async def test_a_prompt_goes_where_its_kv_is() -> None:
    async with fleet() as made:
        others = [encode(f"{number} {PROMPT}") for number in range(6)]
        for number, ids in enumerate(others):
            made.has(number % 3, ids)
        for number, ids in enumerate(others):
            assert await made.goes_to(prompt=ids) == number % 3
        assert made.located() == {"all": 6, "some": 0, "none": 0}
        assert not made.stand.count("policy_fallbacks", reason="error")


@on_a_loop
async def test_the_longest_beginning_counts() -> None:
    async with fleet() as made:
        ids = encode(PROMPT)
        made.has(0, ids[: 4 * BLOCK])
        made.has(1, ids[: 12 * BLOCK])
        made.has(2, [7, *ids])
        assert await made.goes_to(prompt=[*ids, 300, 301]) == 1


@on_a_loop
async def test_text_and_chat_are_tokenized_by_an_engine_once() -> None:
    async with fleet() as made:
        made.has(2, encode(PROMPT))
        made.has(1, render(CHAT))
        for _ in range(3):
            assert await made.goes_to(prompt=PROMPT) == 2
            assert await made.goes_to("/v1/chat/completions", messages=CHAT) == 1
        assert made.tokenized("asked") == 2
        assert made.tokenized("known") == 4
        assert sum(len(each.of("/tokenize")) for each in made.stand.decode) == 2


@on_a_loop
async def test_salt_and_adapter_are_those_of_the_request() -> None:
    async with fleet() as made:
        ids = encode(PROMPT)
        for each in made.stand.decode:
            each.adapters = {"poems": "/adapters/poems"}
        made.has(0, ids)
        made.has(1, ids, "tenant")
        made.has(2, ids, None, ("poems", "/adapters/poems"))
        assert await made.goes_to(prompt=ids, model="model") == 0
        assert await made.goes_to(prompt=ids, model="model", cache_salt="tenant") == 1
        assert await made.goes_to(prompt=ids, model="poems") == 2


@on_a_loop
async def test_pools_that_cannot_be_asked_are_taken_by_what_was_routed() -> None:
    async with fleet(2, closed=(0, 1), history_tokens=1 << 20) as made:
        first = await made.goes_to(prompt=PROMPT)
        for _ in range(3):
            assert await made.goes_to(prompt=PROMPT) == first
        assert made.located() == {"all": 0, "some": 0, "none": 4}


@on_a_loop
async def test_an_engine_that_is_added_can_be_asked_until_it_is_removed() -> None:
    async with fleet(2, fleet=(), admin_port=0) as made:
        url, pool = made.stand.decode[1].url, made.pools[1]
        made.has(1, encode(PROMPT))
        await made.goes_to(prompt=encode(PROMPT))
        assert not sum(made.located().values())
        await admin(made.stand, "POST", "/engines/remove", url=url)
        status, told = await admin(
            made.stand, "POST", "/engines", url=url, role="both", fleet=pool.address.shown
        )
        assert (status, told["fleet"]) == (200, pool.address.shown)
        for _ in range(3):
            assert await made.goes_to(prompt=encode(PROMPT)) == 1
        assert made.located() == {"all": 3, "some": 0, "none": 0}
        assert pool.server.standings()
        await admin(made.stand, "POST", "/engines/remove", url=url)
        assert await made.goes_to(prompt=encode(PROMPT)) == 0
        assert made.located()["all"] == 3
        await until(lambda: not pool.server.standings())


@on_a_loop
async def test_one_that_is_gone_does_not_keep_others_from_being_asked() -> None:
    async with fleet(3, closed=(0,)) as made:
        made.has(2, encode(PROMPT))
        for _ in range(3):
            assert await made.goes_to(prompt=encode(PROMPT)) == 2
        assert made.located() == {"all": 0, "some": 3, "none": 0}


@on_a_loop
async def test_an_engine_that_says_nothing_is_not_waited_for() -> None:
    """Its port takes connections and answers nobody; the time that it has is short, the client's is not."""
    with closing(socket.create_server(("127.0.0.1", 0))) as silent:
        pools = [PeerPool(512, SLOT, columns=1) for _ in range(2)]
        pools[1].shown.locator = Locator(PromptHashes("sha256_cbor", BLOCK, BLOCK), 1, False)
        engines = [Upstream(f"d{number}", role="both") for number in range(2)]
        port = silent.getsockname()[1]
        where = (
            (engines[0].url, pools[0].address._replace(port=port)),
            (engines[1].url, pools[1].address),
        )
        settings = {**LONG, "locate_seconds": 0.5, "fleet": where, "fleet_key": KEY}
        async with stand(decode=engines, both=True, policy=PrefixPolicy(), **settings) as made:
            found = Fleet(made, pools)
            for _ in range(3):
                await found.goes_to(prompt=encode(PROMPT))
            assert not made.count("policy_fallbacks", reason="late")
        for each in pools:
            each.close()


@on_a_loop
async def test_the_key_is_asked_for() -> None:
    async with fleet(2, fleet_key=b"x" * 32) as made:
        made.has(1, encode(PROMPT))
        await made.goes_to(prompt=encode(PROMPT))
        assert made.located() == {"all": 0, "some": 0, "none": 1}


@on_a_loop
async def test_many_at_once_are_all_answered() -> None:
    async with fleet(2) as made:
        made.has(1, encode(PROMPT))
        told = await asyncio.gather(
            *(made.stand.ask(prompt=[*encode(PROMPT), 300 + number], max_tokens=1) for number in range(64))
        )
        assert {each.status for each in told} == {200}
        assert not made.stand.count("policy_fallbacks", reason="error")
        assert sum(made.located().values()) == 64
        assert all(len(pool.server.standings()) <= 4 for pool in made.pools)
