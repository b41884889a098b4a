"""One real engine prefills and another decodes, and NIXL reads the one's pool."""

import json
import os
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from offload.cli import main
from offload.testing.engines.server import ServerProcess, held_port
from tests.engine.answers import ALL_RESTORED, BLOCK_BYTES, BLOCK_SIZE
from tests.engine.fleets import (
    NUM_BLOCKS,
    NUM_TOKENS,
    ask,
    assert_same,
    body_of,
    cold,
    computed,
    prompt_of,
    total,
    wait_for,
)
from tests.engine.server import SIZES, served_model
from tests.nixl import FOLDER, need_nixl

pytestmark = pytest.mark.engine

_ELSEWHERE = """
from offload.worker.peers import listener


def machine() -> str:
    raise OSError("each engine is elsewhere, so no pool is read from memory")


listener.machine = machine
"""


class Pair(NamedTuple):
    """Two servers, and the directory of the operator's socket of the second."""

    prefill: ServerProcess
    decode: ServerProcess
    sockets: Path


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    need_nixl()
    custom = tmp_path_factory.mktemp("elsewhere")
    (custom / "sitecustomize.py").write_text(_ELSEWHERE)
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        paths = [str(custom), str(FOLDER), *filter(None, [os.environ.get("PYTHONPATH")])]
        patch.setenv("PYTHONPATH", os.pathsep.join(paths))
        sockets = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvo"))) / "run"
        peer = f"127.0.0.1:{stack.enter_context(held_port()).getsockname()[1]}"
        both: dict[str, Any] = {"cpu_gib": 0.0625, "peer_transport": "nixl", **ALL_RESTORED}
        configs = [
            {**both, "role": "prefill", "listen": peer},
            {
                **both,
                "role": "decode",
                "peers": [peer],
                "peer_wait_seconds": 60,
                "operator_socket": str(sockets),
            },
        ]
        servers = [
            stack.enter_context(
                ServerProcess(tmp_path_factory.mktemp("pair"), served_model(), SIZES, config, {})
            )
            for config in configs
        ]
        prefill, decode = [server.ready() for server in servers]
        yield Pair(prefill, decode, sockets)


def told(pair: Pair, capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    """What the engine that decodes says of the other."""
    assert main(["peers", "--operator-socket", str(pair.sockets), "--json"]) == 0
    [engine] = json.loads(capsys.readouterr().out)["engines"]
    return dict(engine["peers"][0]) if engine["peers"] else {}


def test_what_was_prefilled_is_read_by_nixl(pair: Pair, capsys: pytest.CaptureFixture[str]) -> None:
    """All but what is behind the last full block; answers are those of an engine that has computed it."""
    num_whole = NUM_BLOCKS * BLOCK_SIZE
    num_bytes = 3 * NUM_BLOCKS * BLOCK_BYTES

    def has_told(state: str, least: int) -> bool:
        cold(pair.decode.http, prompt_of(99, BLOCK_SIZE))  # an engine tells of its ranks as it steps
        found = told(pair, capsys)
        return bool(found and found["state"] == state and found["num_bytes"] >= least)

    wait_for(lambda: has_told("connected", 0), "it is not connected")
    errors = told(pair, capsys)["num_errors"]  # from before the other was up
    for seed in range(3):
        prompt = prompt_of(100 + seed)
        handed = hand_off(pair.prefill, prompt)
        assert "cpu_offload_from_peer" in handed, handed
        before = computed([pair.decode]), total([pair.decode], "cpu_offload_restored_tokens")
        answer = ask(pair.decode.http, prompt, kv_transfer_params=handed)
        assert computed([pair.decode]) - before[0] == NUM_TOKENS - num_whole
        assert total([pair.decode], "cpu_offload_restored_tokens") - before[1] == num_whole
        assert_same(answer, cold(pair.prefill.http, prompt))
    wait_for(lambda: has_told("connected", num_bytes), "not all bytes have come by it")
    found = told(pair, capsys)
    assert (found["transport"], found["num_bytes"], found["num_errors"]) == ("nixl", num_bytes, errors)


def hand_off(server: ServerProcess, prompt: list[int]) -> dict[str, Any]:
    """What an engine says when it has computed a prompt for another one."""
    body = body_of(prompt, max_tokens=1, kv_transfer_params={"do_remote_decode": True})
    with server.http.open("/v1/completions", body) as response:
        return dict(json.load(response)["kv_transfer_params"] or {})
