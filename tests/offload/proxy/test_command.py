"""The command, its options, and what is refused before anything listens."""

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from offload.cli import main
from offload.proxy.server import Proxy
from offload.proxy.settings import ProxySettings
from offload.testing.upstream import Upstream
from tests.offload.proxy.kit import on_a_loop

ROOT = Path(__file__).resolve().parents[3]
ENGINE = ["--both", "http://127.0.0.1:1"]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "no engine decodes; give at least one --decode URL"),
        (["--prefill", "http://127.0.0.1:1"], "no engine decodes"),
        (["--decode", "127.0.0.1:1"], "'127.0.0.1:1' is no URL of an engine; give one such as http://"),
        (["--decode", "ftp://a"], "'ftp://a' is no URL of an engine"),
        (["--decode", "http://u:secret@a"], "the URL of a has more than scheme, host, port and path"),
        (["--decode", "http://a:99999"], "is no URL"),
        (["--decode", "http://a", "--prefill", "http://a/"], "http://a is given more than once"),
        ([*ENGINE, "--port", "70000"], "--port 70000 is no port; use one from 0 to 65535"),
        ([*ENGINE, "--admin-port", "8080"], "--admin-port 8080 is --port; give it another"),
        ([*ENGINE, "--admin-port", "8081", "--admin-host", "0.0.0.0"], "can be reached from elsewhere"),
        ([*ENGINE, "--admin-key-file", "/nowhere"], "--admin-key-file /nowhere cannot be read"),
        ([*ENGINE, "--policy", "fastest"], "--policy 'fastest' is not known; use round_robin, least_load"),
        ([*ENGINE, "--policy", "nowhere:Class"], "--policy nowhere:Class cannot be made (ModuleNotFound"),
        ([*ENGINE, "--policy", "builtins:object"], "has no method choose(request, fleet)"),
        ([*ENGINE, "--connect-seconds", "0"], "--connect-seconds 0 is out of range; use more than 0"),
        ([*ENGINE, "--stall-seconds", "nan"], "--stall-seconds nan is out of range"),
        ([*ENGINE, "--drain-seconds", "-1"], "--drain-seconds -1 is out of range; use 0 to 86400"),
        ([*ENGINE, "--locate-seconds", "0"], "--locate-seconds 0 is out of range"),
        ([*ENGINE, "--fleet", "http://a", "a:1"], "--fleet http://a is none of the engines; give it as"),
        ([*ENGINE, "--fleet", ENGINE[1], "a"], "--fleet 'a': it has no port; give host:port"),
        ([*ENGINE, "--fleet", ENGINE[1], "10.0.0.1:1"], "is on another machine; give --fleet-key-file"),
        ([*ENGINE, *["--fleet", ENGINE[1], "[::1]:1"] * 2], "--fleet is given more than once"),
        ([*ENGINE, "--fleet-key-file", "/nowhere"], "/nowhere"),
        ([*ENGINE, "--kv-events", ENGINE[1]], "--kv-events has 0 endpoints; give tcp://host:port"),
        ([*ENGINE, "--kv-events", ENGINE[1], *["tcp://a:1"] * 3], "--kv-events has 3 endpoints; give"),
        ([*ENGINE, "--kv-events", ENGINE[1], "tcp://*:5557"], "'tcp://*:5557' is no endpoint that can be"),
        ([*ENGINE, "--kv-events", ENGINE[1], "a:1"], "'a:1' is no endpoint that can be connected to; give"),
        ([*ENGINE, "--kv-events", ENGINE[1], "ipc:///a", "tcp://a:0"], "'tcp://a:0' is no endpoint"),
        ([*ENGINE, "--kv-events", "http://a", "tcp://a:1"], "--kv-events http://a is none of the engines"),
        ([*ENGINE, *["--kv-events", ENGINE[1], "tcp://a:1"] * 2], "--kv-events is given more than once"),
        ([*ENGINE, "--index-blocks", "0"], "--index-blocks 0 is out of range; use 1 to"),
        ([*ENGINE, "--policy", "prefix", "--fleet-tls", "/a", "/b", "/c"], "fleet_tls: /a and /b cannot"),
        ([*ENGINE, "--max-requests", "0"], "--max-requests 0 is out of range; use 1 to 1000000"),
        ([*ENGINE, "--pass", "v1"], "--pass 'v1' is no path; give one such as /v1/audio/speech"),
    ],
)
def test_what_is_wrong_is_refused_with_a_remedy(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["proxy", *arguments]) == 1
    told = capsys.readouterr()
    assert not told.out and told.err.startswith("refused: ") and says in told.err
    assert "secret" not in told.err


@pytest.mark.parametrize("key", ["short", "", "sixteen characters\nand a line"])
def test_a_key_must_be_one(key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "key"
    path.write_text(key)
    assert main(["proxy", *ENGINE, "--admin-key-file", str(path)]) == 1
    assert "openssl rand -hex 32" in capsys.readouterr().err


def test_a_port_that_is_taken_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["proxy", *ENGINE, "--port", str(port)]) == 1
    assert f"--port {port} at 127.0.0.1 cannot be had" in capsys.readouterr().err


@on_a_loop
async def test_an_admin_port_that_is_taken_leaves_nobody_listening() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        settings = ProxySettings(
            engines=(("http://127.0.0.1:1", "both"),), port=0, admin_port=taken.getsockname()[1]
        )
        from offload.errors import ProxyError
        from offload.proxy.policies import RoundRobin

        proxy = Proxy(settings, RoundRobin())
        with pytest.raises(ProxyError, match="--admin-port"):
            await proxy.__aenter__()
        with pytest.raises(ConnectionRefusedError):
            await asyncio.open_connection("127.0.0.1", proxy.port)


def test_neither_torch_nor_vllm_is_imported() -> None:
    """Not even by the command, which has other subcommands."""
    program = (
        "import sys, offload.proxy, offload.proxy.server\n"
        "from offload.cli import main\n"
        "assert main(['proxy', '--decode', 'x']) == 1\n"
        "print(sorted({name.partition('.')[0] for name in sys.modules} & {'torch', 'vllm'}))\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    told = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    assert told.stdout == "[]\n"


@on_a_loop
async def test_the_command_serves_until_it_is_told_to_end() -> None:
    """In a process of its own, without torch and vLLM on its path being asked for."""
    async with Upstream("d") as engine:
        command = [sys.executable, "-m", "offload.cli", "proxy", "--both", engine.url, "--port", "0"]
        command += ["--admin-port", "0"]
        process = await asyncio.create_subprocess_exec(
            *command,
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )
        assert process.stdout is not None
        url, admin = [
            re.findall(r"http://\S+", (await process.stdout.readline()).decode())[0] for _ in range(2)
        ]
        body: dict[str, Any] = {"prompt": "hello", "max_tokens": 3}
        async with aiohttp.ClientSession() as client:
            async with client.post(f"{url}/v1/completions", json=body) as response:
                assert response.status == 200
            async with client.get(f"{admin}/metrics") as response:
                assert (
                    'requests_total{outcome="answered",path="/v1/completions"} 1.0' in await response.text()
                )
        process.send_signal(signal.SIGTERM)
        _, told = await process.communicate()
        assert process.returncode == 0, told
        assert b"Traceback" not in told
