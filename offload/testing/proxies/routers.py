"""How each proxy is started."""

import os
from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from offload.testing.engines.server import held_port
from offload.testing.proxies.process import PORT, ProxyProcess

__all__ = ["ROUTER_FOLDER", "has_vllm_router", "kv_offload_proxy", "toy_like", "toy_proxy", "vllm_router"]

_ROOT = Path(__file__).resolve().parents[3]

ROUTER_FOLDER = Path(os.environ.get("KV_OFFLOAD_VLLM_ROUTER", _ROOT / ".venv" / "router"))
"""Where `.ci/setup-router` puts vllm-router, which no other part of the environment needs."""


def has_vllm_router() -> bool:
    """Whether vllm-router is there."""
    return (ROUTER_FOLDER / "vllm_router").is_dir()


def kv_offload_proxy(
    prefill: Sequence[str], decode: Sequence[str], options: Sequence[str] = ()
) -> ProxyProcess:
    """Ours. ``options``: of `kv-offload proxy`, beside engines and port."""
    command = ["-m", "offload.cli", "proxy", "--port", PORT, *options]
    named = {"--prefill": prefill, "--decode": decode}
    command += [part for flag, urls in named.items() for url in urls for part in (flag, url)]
    return ProxyProcess("kv-offload proxy", command, {"PYTHONPATH": _with(_ROOT)})


def vllm_router(prefill: Sequence[str], decode: Sequence[str]) -> ProxyProcess:
    """vllm-router from PyPI with a pool of prefill engines and one of decode engines, round robin in both.

    An engine that is in both needs two addresses. ``prefill``, ``decode``: URLs.
    """
    with held_port() as held:  # its metrics need a port, and 0 is none to it
        metrics = held.getsockname()[1]
    command = ["-m", "vllm_router.launch_router", "--vllm-pd-disaggregation", "--policy", "round_robin"]
    command += ["--host", "127.0.0.1", "--port", PORT, "--prometheus-port", str(metrics)]
    command += [part for url in prefill for part in ("--prefill", url)]
    command += [part for url in decode for part in ("--decode", url)]
    return ProxyProcess("vllm-router", command, {"PYTHONPATH": _with(ROUTER_FOLDER)})


def toy_like(prefill: Sequence[str], decode: Sequence[str]) -> ProxyProcess:
    """A proxy that does what vLLM's toy proxy does, with the same libraries. See ``toy``."""
    command = ["-m", "offload.testing.proxies.toy", "--port", PORT]
    command += ["--prefill", *prefill, "--decode", *decode]
    return ProxyProcess("toy-like", command, {"PYTHONPATH": _with(_ROOT)}, ready="/healthcheck")


def toy_proxy(file: Path, prefill: Sequence[str], decode: Sequence[str]) -> ProxyProcess:
    """vLLM's own ``toy_proxy_server.py``, which is no part of its wheel. ``file``: of a checkout of vLLM."""
    command = [str(file), "--host", "127.0.0.1", "--port", PORT]
    for flag, urls in (("prefiller", prefill), ("decoder", decode)):
        parts = [urlsplit(url) for url in urls]
        command += [f"--{flag}-hosts", *(str(part.hostname) for part in parts)]
        command += [f"--{flag}-ports", *(str(part.port) for part in parts)]
    return ProxyProcess("toy proxy", command, ready="/healthcheck")


def _with(folder: Path) -> str:
    """A ``PYTHONPATH`` that begins there."""
    return os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
