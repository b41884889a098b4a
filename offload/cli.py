"""The command ``kv-offload``."""

import argparse
import json
import sys
from collections.abc import Sequence
from importlib.metadata import version

from offload.config import GIB, OffloadConfig, check_host_memory, check_record_trace
from offload.errors import OffloadError
from offload.host_limits import host_memory_bytes
from offload.size_command import add_size_command


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status: 0 fine, 1 refused, 2 wrong usage."""
    parser = argparse.ArgumentParser(prog="kv-offload", description="A CPU KV-cache tier for vLLM.")
    parser.add_argument("--version", action="version", version=f"kv-offload {version('kv-offload')}")
    commands = parser.add_subparsers(dest="command", required=True)
    check = commands.add_parser(
        "check", help="check vLLM's version, this machine and a configuration, and print the flag for vLLM"
    )
    check.add_argument(
        "--config",
        default='{"cpu_gib": 8}',
        metavar="JSON",
        help="kv_connector_extra_config to check, such as '{\"cpu_gib\": 8}' (the default)",
    )
    check.set_defaults(run=_check)
    add_size_command(commands)
    options = parser.parse_args(argv)
    try:
        options.run(options)
    except OffloadError as error:
        print(f"refused: {error}", file=sys.stderr)
        return 1
    return 0


def _check(options: argparse.Namespace) -> None:
    config_json: str = options.config
    try:
        settings = json.loads(config_json)
    except json.JSONDecodeError as error:
        raise OffloadError(
            f"--config {config_json!r} is not JSON ({error}); quote it as one argument"
        ) from None
    if not isinstance(settings, dict):
        raise OffloadError(f'--config {config_json!r} is not a JSON object; use for example {{"cpu_gib": 8}}')
    config = OffloadConfig.from_mapping(settings)
    check_host_memory(config)
    check_record_trace(config)
    print(f"memory   {host_memory_bytes() / GIB:.1f} GiB, {config.cpu_gib} of them for the pool")
    print(f"vLLM     {_vllm_version()}")
    transfer = {
        "kv_connector": "CpuOffloadConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": settings,
    }
    print(f"flag     --kv-transfer-config '{json.dumps(transfer)}'")


def _vllm_version() -> str:
    try:
        from offload.vllm.versions import check_vllm_version
    except ModuleNotFoundError:
        raise OffloadError("vLLM is not installed here; install it, or run this where it is") from None
    return check_vllm_version()
