"""Engines come, drain and go while requests run; health; other paths; metrics."""

import asyncio
from typing import Any

import pytest

from offload.proxy.members import Leg, Members
from offload.proxy.strangers import count_in
from offload.testing.upstream import Fault, Upstream, answer, decode, encode
from tests.offload.proxy.kit import PROMPT, Stand, on_a_loop, stand, until
from tests.offload.proxy.test_legs import expected

KEY = "0123456789abcdef"


async def admin(it: Stand, method: str, path: str, *, key: str | None = None, **body: Any) -> tuple[int, Any]:
    port = it.proxy.admin_port
    base = f"http://127.0.0.1:{port}" if port is not None else f"{it.url}/admin"
    headers = {} if key is None else {"X-Admin-Key": key}
    async with it.client.request(method, base + path, json=body or None, headers=headers) as response:
        told = await response.read()
        return response.status, await response.json() if response.content_type.endswith("json") else told


async def states(it: Stand) -> dict[str, str]:
    _, told = await admin(it, "GET", "/engines")
    return {each["url"]: each["state"] for each in told["engines"]}


@on_a_loop
async def test_engines_are_added_and_removed_while_it_runs() -> None:
    async with Upstream("new") as new, stand(decode=1, admin_port=0) as it:
        old = it.decode[0]
        assert await states(it) == {old.url: "up"}
        status, _ = await admin(it, "POST", "/engines", url=new.url, role="decode")
        assert status == 200 and set(await states(it)) == {old.url, new.url}
        status, told = await admin(it, "POST", "/engines", url=new.url + "/", role="decode")
        assert status == 400 and "is there already" in told["error"]["message"]
        status, _ = await admin(it, "POST", "/engines/remove", url=old.url)
        assert status == 200
        for _ in range(3):
            assert (await it.ask(prompt="x", max_tokens=1)).status == 200
        assert len(new.of()) == 3 and not old.of()
        await admin(it, "POST", "/engines/remove", url=new.url)
        assert (await it.ask(prompt="x")).status == 503


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/engines", {"url": "nonsense"}, 400),
        ("/engines", {"url": 5}, 400),
        ("/engines", {"url": "http://127.0.0.1:1", "role": "chief"}, 400),
        ("/engines", {"url": "http://127.0.0.1:1", "role": ["x"]}, 400),
        ("/engines", {"url": "http://127.0.0.1:1", "fleet": 7000}, 400),
        ("/engines", {"url": "http://127.0.0.1:1", "fleet": "127.0.0.1"}, 400),
        ("/engines", {"url": "http://127.0.0.1:1", "fleet": "10.0.0.1:7000"}, 400),
        ("/engines/remove", {"url": "http://127.0.0.1:1"}, 400),
        ("/engines/drain", {"url": "http://127.0.0.1:1"}, 404),
        ("/engines/resume", {"url": "http://127.0.0.1:1"}, 404),
        ("/engines/drain", {"x": 1}, 400),
    ],
)
@on_a_loop
async def test_wrong_admin_requests_are_refused(path: str, body: dict[str, Any], status: int) -> None:
    async with stand(decode=1, admin_port=0) as it:
        assert (await admin(it, "POST", path, **body))[0] == status
        assert await states(it) == {it.decode[0].url: "up"}


@on_a_loop
async def test_admin_endpoints_have_a_key_or_a_port_of_their_own() -> None:
    async with stand(decode=1, admin_key=KEY) as it:
        assert it.proxy.admin_port is None
        for key in (None, "", "wrong", "ä"):
            status, _ = await admin(it, "GET", "/engines", key=key)
            assert status == 401
        assert (await admin(it, "GET", "/engines", key=KEY))[0] == 200
        assert (await admin(it, "GET", "/metrics", key=KEY))[0] == 200
    async with stand(decode=1) as it, it.client.get(f"{it.url}/admin/engines") as response:
        assert response.status == 404
    async with stand(decode=1, admin_port=0, admin_key=KEY) as it:
        assert (await admin(it, "GET", "/engines"))[0] == 401
        async with it.client.get(f"{it.url}/engines") as response:
            assert response.status == 404


@pytest.mark.parametrize("is_stream", [False, True])
@on_a_loop
async def test_a_drained_engine_gets_nothing_new_and_what_runs_goes_on_elsewhere(is_stream: bool) -> None:
    async with stand(decode=2, admin_port=0, drain_seconds=0.0) as it:
        first, second = it.decode
        first.faults.queue = [Fault("hang", after=7)]
        body = {"prompt": "hello", "max_tokens": 20, "ignore_eos": True}
        asked = asyncio.create_task(it.ask(**body, stream=is_stream))
        await until(lambda: bool(first.of()) and first.of()[0].num_tokens >= 7)
        await admin(it, "POST", "/engines/drain", url=first.url)
        told = await asked
        assert told.text == expected_all(20)
        assert len(second.of()) == 1
        assert (await states(it))[first.url] == "draining"
        for _ in range(3):
            await it.ask(prompt="x", max_tokens=1)
        assert len(first.of()) == 1
        assert it.proxy.core.members.get(first.url).num_failures == 0  # type: ignore[union-attr]
        await admin(it, "POST", "/engines/resume", url=first.url)
        for _ in range(2):
            await it.ask(prompt="x", max_tokens=1)
        assert len(first.of()) == 2


def expected_all(num_tokens: int) -> str:
    """Of "hello", whose answer has no end of its own before that."""
    said = answer(encode("hello"), num_tokens)
    assert len(said) == num_tokens
    return decode(said).rstrip("�")


@on_a_loop
async def test_what_cannot_move_ends_where_it_is() -> None:
    async with stand(decode=2, admin_port=0, drain_seconds=0.0) as it:
        gate = asyncio.Event()
        it.decode[0].faults.queue = [Fault("wait", after=7, until=gate)]
        asked = asyncio.create_task(
            it.ask(prompt="hello", max_tokens=20, seed=1, stream=True, ignore_eos=True)
        )
        await until(lambda: bool(it.decode[0].of()) and it.decode[0].of()[0].num_tokens >= 7)
        await admin(it, "POST", "/engines/drain", url=it.decode[0].url)
        assert (await it.ask(prompt="x", max_tokens=1)).status == 200
        gate.set()
        told = await asked
        assert told.error is None and told.text == expected_all(20)


@on_a_loop
async def test_the_last_engine_drains_and_serves() -> None:
    async with stand(decode=1, admin_port=0, drain_seconds=0.0) as it:
        await admin(it, "POST", "/engines/drain", url=it.decode[0].url)
        assert (await it.ask(prompt="hello", max_tokens=1)).status == 200


@on_a_loop
async def test_an_engine_that_says_it_is_ill_is_asked_last() -> None:
    async with stand(decode=2, health_seconds=0.01, admin_port=0) as it:
        it.decode[0].is_healthy = False
        core = it.proxy.core
        member = core.members.get(it.decode[0].url)
        assert member is not None
        await until(lambda: not member.is_up)
        for _ in range(4):
            assert (await it.ask(prompt="x", max_tokens=1)).status == 200
        assert not it.decode[0].of() and len(it.decode[1].of()) == 4
        await it.decode[1].kill()
        assert (await it.ask(prompt="x", max_tokens=1)).status == 200  # ill is better than dead
        it.decode[0].is_healthy = True
        await until(lambda: member.is_up)


@on_a_loop
async def test_an_engine_that_was_ill_when_it_was_asked_has_time_to_answer() -> None:
    """It is looked at many times meanwhile, and still says that it is ill."""
    async with stand(decode=1, health_seconds=0.01, admin_port=0) as it:
        it.decode[0].is_healthy = False
        member = it.proxy.core.members.get(it.decode[0].url)
        assert member is not None
        await until(lambda: not member.is_up)
        gate = asyncio.Event()
        it.decode[0].faults.queue = [Fault("wait", until=gate)]
        asked = asyncio.create_task(it.ask(prompt="x", max_tokens=1))
        await until(lambda: bool(it.decode[0].of()))
        num_looks = it.decode[0].num_looks
        await until(lambda: it.decode[0].num_looks >= num_looks + 5)
        gate.set()
        assert (await asked).status == 200 and len(it.decode[0].of()) == 1


@on_a_loop
async def test_what_hangs_at_an_engine_that_is_down_goes_on_elsewhere() -> None:
    async with stand(decode=2, health_seconds=0.05) as it:
        it.decode[0].faults.queue = [Fault("hang", after=7)]
        asked = asyncio.create_task(it.ask(prompt="hello", max_tokens=20, ignore_eos=True, stream=True))
        await until(lambda: bool(it.decode[0].of()) and it.decode[0].of()[0].num_tokens >= 7)
        it.decode[0].is_healthy = False
        assert (await asked).text == expected_all(20)


@on_a_loop
async def test_a_prefill_engine_that_dies_costs_nobody_an_answer() -> None:
    async with stand(prefill=2, decode=1) as it:
        await it.prefill[0].kill()
        for number in range(8):
            told = await it.ask(prompt=PROMPT + f" w{number}", max_tokens=3)
            assert told.text == expected(encode(PROMPT + f" w{number}"), 3)
        assert it.count("ejections", engine=it.prefill[0].url) == 1
        assert len(it.prefill[1].of()) >= 4


def test_an_engine_is_ejected_tried_and_taken_back() -> None:
    now = [100.0]
    members = Members([("http://a", "both"), ("http://b", "both")], lambda: now[0])
    a = members.get("http://a")
    assert a is not None

    def there() -> list[str]:
        members.check_invariants()
        found = members.fleet(set(), True)
        assert found is not None
        return [each.url[-1] for each in found.decode]

    assert not a.failed(now[0], False, 3, 10.0) and there() == ["a", "b"]
    a.succeeded()
    for _ in range(2):
        assert not a.failed(now[0], False, 3, 10.0)
    assert a.failed(now[0], False, 3, 10.0) and there() == ["b"]
    now[0] = 110.0
    assert there() == ["a", "b"]
    a.begin()  # one request tries it, others do not
    assert there() == ["b"]
    assert not a.failed(now[0], False, 3, 10.0) and there() == ["b"]
    now[0] = 129.0  # longer than the first time
    assert there() == ["b"]
    now[0] = 130.0
    a.begin()
    a.heard()
    assert there() == ["a", "b"]
    assert a.failed(now[0], False, 3, 10.0) and there() == ["b"]  # once more is enough
    now[0] = 200.0
    a.begin()
    a.forgotten()  # its client went away
    assert there() == ["a", "b"]
    a.succeeded()
    assert a.failed(now[0], True, 3, 10.0) and there() == ["b"]  # nobody listens
    b = members.get("http://b")
    assert b is not None
    b.is_draining = True
    assert there() == ["a"]
    assert members.fleet({"http://a"}, True) is not None
    assert members.fleet({"http://a", "http://b"}, True) is None


@pytest.mark.parametrize("waits_for_client", [False, True])
@on_a_loop
async def test_a_leg_moves_whenever_it_waits_for_the_engine(waits_for_client: bool) -> None:
    leg = Leg(lambda: True)

    async def wait() -> None:
        async with asyncio.timeout(60) as timer:
            with leg.watched(timer):
                if waits_for_client:
                    leg.pause()  # the client gets what was said
                leg.move("drained")
                if waits_for_client:
                    await asyncio.sleep(0)
                    leg.resume()
                await asyncio.sleep(60)

    with pytest.raises(TimeoutError):
        await wait()
    assert leg.why == "drained"


@on_a_loop
async def test_other_paths_pass_to_an_engine() -> None:
    async with stand(prefill=1, decode=2) as it:
        async with it.client.get(f"{it.url}/v1/models") as response:
            assert response.status == 200 and response.headers["X-Engine"] in ("d0", "d1")
        told = await it.ask("/v1/embeddings", input="x")
        assert told.body["data"][0]["embedding"] == [0.0, 1.0]
        hints = {"cpu_offload_store": False}
        told = await it.ask("/v1/responses", input="x", kv_transfer_params=hints | {"remote_host": "h"})
        assert told.body["body"]["kv_transfer_params"] == hints
        assert (await it.ask("/tokenize", prompt="ab")).body["tokens"] == [97, 98]
        async with it.client.get(f"{it.url}/health") as response:
            assert response.status == 200
        async with it.client.get(f"{it.url}/v1/none") as response:
            assert response.status == 404
        assert not it.prefill[0].of("/v1/embeddings")


@on_a_loop
async def test_another_engine_answers_other_paths_when_one_does_not() -> None:
    async with stand(decode=2) as it:
        await it.decode[0].kill()
        for _ in range(3):
            assert (await it.ask("/v1/embeddings", input="x")).status == 200
        await it.decode[1].kill()
        for path in ("/health", "/v1/models"):
            async with it.client.get(it.url + path) as response:
                assert response.status == 503


@pytest.mark.parametrize(
    "path",
    [
        "/reset_prefix_cache",
        "/sleep",
        "/metrics",
        "/v1/load_lora_adapter",
        "/v1/../sleep",
        "/",
        "/update_weights",
    ],
)
@on_a_loop
async def test_paths_that_change_engines_are_not_for_clients(path: str) -> None:
    async with stand(decode=1) as it:
        reader, writer = await asyncio.open_connection("127.0.0.1", it.proxy.port)
        writer.write(f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n".encode())
        assert b" 404 " in await reader.readline()
        writer.close()
        assert [each.path for each in it.decode[0].received if each.path != "/health"] == []


@on_a_loop
async def test_a_path_can_be_passed_on_request() -> None:
    async with stand(decode=1, passed=("/detokenize_all",)) as it:
        assert (await it.ask("/detokenize_all", x=1)).body == b"404: Not Found"  # says the engine


@on_a_loop
async def test_metrics_tell_what_happens() -> None:
    async with stand(prefill=1, decode=1, admin_port=0) as it:
        await it.ask(prompt=PROMPT, max_tokens=2, stream=True)
        status, told = await admin(it, "GET", "/metrics")
        text = told.decode()
        assert status == 200
        for line in (
            'kv_offload_proxy_requests_total{outcome="answered",path="/v1/completions"} 1.0',
            'kv_offload_proxy_legs_total{outcome="done",role="prefill"} 1.0',
            'kv_offload_proxy_legs_total{outcome="done",role="decode"} 1.0',
            'kv_offload_proxy_request_seconds_count{path="/v1/completions"} 1.0',
            'kv_offload_proxy_first_byte_seconds_count{path="/v1/completions"} 1.0',
            'kv_offload_proxy_prefill_seconds_count{outcome="done"} 1.0',
            f'kv_offload_proxy_engine_legs{{engine="{it.decode[0].url}",role="decode",state="up"}} 0.0',
            "kv_offload_proxy_running 0.0",
        ):
            assert line in text, line


@on_a_loop
async def test_a_prefill_engine_that_a_decode_engine_does_not_know_is_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with stand(prefill=1, decode=[Upstream("d0", role="decode", knows=[])], health_seconds=0.01) as it:
        url = it.prefill[0].url
        for number in range(1, 4):
            assert (await it.ask(prompt=PROMPT + f" w{number}", max_tokens=1)).status == 200
            await until(lambda: it.count("unknown_peers", reason="unknown peer") == number)  # noqa: B023
        said = [each.getMessage() for each in caplog.records if url in each.getMessage()]
        assert len(said) == 1 and "name all prefill engines among its peers" in said[0]


@on_a_loop
async def test_a_prefill_engine_without_a_connector_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    async with stand(prefill=[Upstream("p0", role="decode")], decode=1) as it:
        for number in range(3):
            assert (await it.ask(prompt=PROMPT + f" w{number}", max_tokens=1)).status == 200
        assert it.count("unknown_peers", reason="prefill engine says nothing") == 3
        assert (
            len([each for each in caplog.records if "returns no kv_transfer_params" in each.getMessage()])
            == 1
        )


@pytest.mark.parametrize(
    ("text", "count"),
    [
        (b"", None),
        (b'vllm:cpu_offload_unused_hand_offs_total{engine="0",reason="late"} 3.0\n', None),
        (b'x\nvllm:cpu_offload_unused_hand_offs_total{engine="0",reason="unknown_peer"} 3.0\n', 3.0),
        (b'vllm:cpu_offload_unused_hand_offs_total{reason="unknown_peer",engine="0"} 1\n' * 2, 2.0),
        (b'vllm:cpu_offload_unused_hand_offs_total{reason="unknown_peer"} many\n', None),
    ],
)
def test_the_counter_of_unknown_peers_is_read(text: bytes, count: float | None) -> None:
    assert count_in(text) == count
