"""``kv-offload proxy``: one address in front of prefill and decode engines."""

import argparse
import asyncio
import importlib
import logging
import signal
from pathlib import Path
from typing import Any

from offload.errors import OffloadError, ProxyError
from offload.fleet_config import TlsFiles, read_fleet_key
from offload.proxy.settings import ProxySettings, engine_url, fleet_address, kv_source, read_key

__all__ = ["add_proxy_command"]

POLICIES = {
    "round_robin": "offload.proxy.policies:RoundRobin",
    "least_load": "offload.proxy.policies:LeastLoad",
    "prefix": "offload.proxy.prefixes:PrefixPolicy",
    "prefix_text": "offload.proxy.prefixes:PrefixTextPolicy",
}
_NUMBERS: tuple[tuple[str, type, str], ...] = (
    ("min_prefill_tokens", int, "prompts of which less is to be computed are not prefilled elsewhere"),
    ("drain_seconds", float, "that requests may go on at an engine which drains"),
    ("connect_seconds", float, "to connect to an engine"),
    ("first_byte_seconds", float, "to the first byte of a stream"),
    ("answer_seconds", float, "to the end of an answer that is no stream"),
    ("stall_seconds", float, "between two bytes of an answer, or of a request"),
    ("prefill_seconds", float, "of a prefill leg"),
    ("health_seconds", float, "between two looks at an engine's health"),
    ("eject_failures", int, "failures in a row after which an engine is left alone for a while"),
    ("eject_seconds", float, "that it is left alone; then one request tries it"),
    ("max_attempts", int, "engines that one request may try to decode at; 0: all"),
    ("max_requests", int, "at one time; further ones are refused with 429"),
    ("max_body_bytes", int, "of a request"),
    ("max_answer_bytes", int, "of an answer that is no stream, and of one event of a stream"),
    ("max_header_bytes", int, "of one header of a request"),
    ("history_tokens", int, "up to which it is remembered which engine has which prompts"),
    ("tokenized_tokens", int, "token ids of prompts that are kept"),
    ("tokenize_seconds", float, "that the policy waits for an engine to tokenize a prompt"),
    ("index_blocks", int, "of each engine that are known by KV events"),
    ("locate_seconds", float, "that the policy waits for engines to say how much of a prompt they have"),
)


def add_proxy_command(commands: Any) -> None:
    """Add the subcommand to those of a parser."""
    proxy: argparse.ArgumentParser = commands.add_parser(
        "proxy",
        help="serve one address in front of prefill and decode engines",
        description="Prefills on one engine, decodes on another, and answers while one engine that decodes "
        "lives. Needs kv-offload[proxy].",
    )
    for role in ("prefill", "decode", "both"):
        proxy.add_argument(
            f"--{role}",
            metavar="URL",
            nargs="+",
            action="extend",
            default=[],
            help=f"engines of role {role}, such as http://10.0.0.1:8000",
        )
    defaults = ProxySettings.__dataclass_fields__
    proxy.add_argument("--host", default=defaults["host"].default, help="to listen at (default: %(default)s)")
    proxy.add_argument("--port", type=int, default=defaults["port"].default, help="(default: %(default)s)")
    proxy.add_argument("--admin-host", default=defaults["admin_host"].default, help="(default: %(default)s)")
    proxy.add_argument("--admin-port", type=int, help="for admin endpoints and metrics (default: none)")
    proxy.add_argument(
        "--admin-key-file",
        type=Path,
        help="a key that admin requests have as X-Admin-Key; without --admin-port they are at /admin",
    )
    proxy.add_argument(
        "--policy",
        default=defaults["policy"].default,
        metavar="NAME",
        help=f"{', '.join(POLICIES)}, or module:Class (default: %(default)s)",
    )
    proxy.add_argument(
        "--sequential", action="store_true", help="a decode leg begins when its prefill leg has ended"
    )
    proxy.add_argument(
        "--pass", dest="passed", metavar="PATH", action="append", default=[], help="one more path for clients"
    )
    proxy.add_argument(
        "--fleet",
        nargs=2,
        action="append",
        default=[],
        metavar=("URL", "HOST:PORT"),
        help="where an engine listens for its fleet, as it has it in listen: policy prefix asks there",
    )
    proxy.add_argument(
        "--kv-events",
        nargs="+",
        action="append",
        default=[],
        metavar=("URL", "ENDPOINT"),
        help="an engine, where it publishes KV events, and its replay endpoint if it has one: policy prefix "
        "knows by these what it has",
    )
    proxy.add_argument("--fleet-key-file", help="the file that engines have as fleet_key_file")
    proxy.add_argument(
        "--fleet-tls",
        nargs=3,
        metavar=("CERT", "KEY", "CA"),
        help="files of PEM, as engines have in fleet_tls",
    )
    for name, kind, what in _NUMBERS:
        proxy.add_argument(
            f"--{name.replace('_', '-')}",
            type=kind,
            default=defaults[name].default,
            help=f"{what} (default: %(default)s)",
        )
    proxy.set_defaults(run=_run)


def settings_of(options: argparse.Namespace) -> ProxySettings:
    """Raises ProxyError for what is wrong."""
    engines = [
        (engine_url(url), role) for role in ("prefill", "decode", "both") for url in getattr(options, role)
    ]
    return ProxySettings(
        engines=tuple(engines),
        host=options.host,
        port=options.port,
        admin_host=options.admin_host,
        admin_port=options.admin_port,
        admin_key=None if options.admin_key_file is None else read_key(options.admin_key_file),
        policy=options.policy,
        is_sequential=options.sequential,
        passed=tuple(options.passed),
        fleet=tuple((engine_url(url), fleet_address(address, "--fleet")) for url, address in options.fleet),
        kv_events=tuple(
            (engine_url(url), kv_source(ends, "--kv-events")) for url, *ends in options.kv_events
        ),
        fleet_key=b"" if options.fleet_key_file is None else read_fleet_key(options.fleet_key_file),
        fleet_tls=None
        if options.fleet_tls is None
        else TlsFiles(**dict(zip(("cert_file", "key_file", "ca_file"), options.fleet_tls, strict=True))),
        **{name: getattr(options, name) for name, _, _ in _NUMBERS},
    )


def load_policy(name: str) -> Any:
    """An object of the class that a name means. Raises ProxyError."""
    target = POLICIES.get(name, name)
    module, colon, attribute = target.partition(":")
    if not colon or not module or not attribute:
        raise ProxyError(f"--policy {name!r} is not known; use {', '.join(POLICIES)}, or module:Class")
    try:
        policy = getattr(importlib.import_module(module), attribute)()
    except Exception as error:
        raise ProxyError(
            f"--policy {name} cannot be made ({error!r}); give a class that can be imported here and made "
            f"without arguments"
        ) from error
    if not callable(getattr(policy, "choose", None)):
        raise ProxyError(
            f"--policy {name} has no method choose(request, fleet); docs/fleet.md has an example"
        )
    return policy


def _run(options: argparse.Namespace) -> int:
    settings = settings_of(options)
    try:
        from offload.proxy.server import Proxy
    except ModuleNotFoundError as missing:
        raise OffloadError(
            f"{missing.name} is not installed here, which the proxy needs: pip install 'kv-offload[proxy]'"
        ) from None
    policy = load_policy(settings.policy)
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s %(message)s", level=logging.INFO)

    async def run() -> None:
        stop = asyncio.Event()
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
        async with Proxy(settings, policy) as proxy:
            engines = ", ".join(f"{url} ({role})" for url, role in settings.engines)
            print(f"listens  http://{settings.host}:{proxy.port} in front of {engines}", flush=True)
            if proxy.admin_port is not None:
                print(f"admin    http://{settings.admin_host}:{proxy.admin_port}", flush=True)
            await stop.wait()

    asyncio.run(run())
    return 0
