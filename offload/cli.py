"""The command ``kv-offload``."""

import argparse
import json
import shlex
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from offload.config import OffloadConfig
from offload.doctor.command import add_doctor_command
from offload.errors import OffloadError, without_vllm
from offload.explain_command import add_explain_command
from offload.files.memory_path import look_for_room
from offload.files.probe import probe
from offload.files.tier_path import check_live
from offload.mooncake_config import MooncakeConfig
from offload.peers_command import add_peers_command
from offload.pool_command import add_pool_command
from offload.pool_config import SharedMemoryConfig
from offload.provenance import own_version
from offload.proxy.command import add_proxy_command
from offload.resize_command import add_resize_command
from offload.restore_config import RestoreWhen
from offload.settings import GIB
from offload.sizing.command import add_size_command
from offload.status_command import add_status_command
from offload.store_config import StoreConfig
from offload.store_probe import probe_store
from offload.tier_command import add_tier_command
from offload.tier_config import DiskConfig
from offload.top_command import add_top_command
from offload.vllm.certification.command import add_certify_command
from offload.weights_command import add_reset_command
from offload.worker.pool.host_limits import free_memory_bytes, host_memory_bytes

_NEW_WEIGHTS = """\
note     After new weights, empty the pool: reset_prefix_cache(reset_connector=True), or over HTTP
         POST /reset_prefix_cache?reset_external=true (vLLM has that route with VLLM_SERVER_DEV_MODE=1 only).
         Without it the pool keeps KV of the old weights.
"""
_NO_ENGINE = """\
note     The model and vLLM's other arguments were not checked: add them after --, as in
         kv-offload check --config JSON -- MODEL --block-size 32
"""
_REMEDIES = {
    "check": "; put vLLM's arguments after --, as in: kv-offload check -- MODEL --block-size 32",
    "certify": "; certify takes none of vLLM's arguments: it tries the vLLM that is installed here",
}
"""What to do about arguments that a command does not know."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; return its exit status: 0 fine, 1 refused or failed, 2 wrong usage."""
    parser = argparse.ArgumentParser(prog="kv-offload", description="A CPU KV-cache tier for vLLM.")
    parser.add_argument("--version", action="version", version=f"kv-offload {own_version()}")
    commands = parser.add_subparsers(dest="command", required=True)
    _add_check_command(commands)
    add_size_command(commands)
    add_certify_command(commands)
    add_tier_command(commands)
    add_status_command(commands)
    add_top_command(commands)
    add_doctor_command(commands)
    add_peers_command(commands)
    add_explain_command(commands)
    add_reset_command(commands)
    add_resize_command(commands)
    add_pool_command(commands)
    add_proxy_command(commands)
    options, unknown = parser.parse_known_args(argv)
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{_REMEDIES.get(options.command, '')}")
    try:
        status: int | None = options.run(options)
    except OffloadError as error:
        print(f"refused: {error}", file=sys.stderr)
        return 1
    return status or 0


def _add_check_command(commands: Any) -> None:
    check = commands.add_parser(
        "check", help="check vLLM's version, this machine and a configuration, and print the flag for vLLM"
    )
    check.add_argument(
        "--config",
        metavar="JSON",
        help="kv_connector_extra_config to check, such as '{\"cpu_gib\": 8}', which is the default",
    )
    check.add_argument(
        "arguments",
        nargs="*",
        metavar="-- MODEL ...",
        help="arguments of vllm serve: the engine's configuration is checked too, as at its start",
    )
    check.set_defaults(run=_check)


def _check(options: argparse.Namespace) -> None:
    arguments: list[str] = options.arguments
    settings = None if options.config is None else _read_settings(options.config)
    if settings is None and not any(each.startswith("--kv-transfer-config") for each in arguments):
        settings = {"cpu_gib": 8}
    if settings is not None:
        OffloadConfig.from_mapping(settings)  # refused at once: it takes seconds to import vLLM
    vllm = _admitted_vllm()
    from offload.vllm.start_check import check_arguments, check_settings, flag_value

    if arguments:
        config = check_arguments(arguments, settings)
    else:
        assert settings is not None
        config = check_settings(settings)
    memory, free = host_memory_bytes() / GIB, free_memory_bytes() / GIB
    print(f"memory   {memory:.1f} GiB in all, {free:.1f} free, {config.cpu_gib} of them for the pool")
    if config.pool is not None:
        print(f"pool     {_pool(config.pool, config.cpu_bytes)}")
    for tier in config.tiers:
        if isinstance(tier, DiskConfig):
            print(f"disk     {_disk(tier)}")
        else:
            print(f"store    {_store(tier)}")
    print(f"vLLM     {vllm}")
    for remark in _remarks(config, memory):
        print(f"note     {remark}")
    print(_NEW_WEIGHTS + ("" if arguments else _NO_ENGINE), end="")
    if settings is not None:
        print(f"flag     --kv-transfer-config {shlex.quote(flag_value(settings))}")


def _remarks(config: OffloadConfig, memory_gib: float) -> Iterator[str]:
    """What is hardly meant, though an engine would start with it."""
    if config.cpu_gib_max is not None and config.cpu_gib_max > memory_gib:
        yield (
            f"cpu_gib_max is {config.cpu_gib_max:g}, and this machine, or the container, has "
            f"{memory_gib:.1f} GiB: lower it, unless there will be more, or other machines have ranks, too"
        )
    is_read = config.eager_because is not None or config.tiers
    if config.restore is RestoreWhen.NEVER and not is_read:
        yield (
            'restore is "never", and nobody else reads the pool: blocks are copied into it, and none is '
            'used; leave restore out: the default is "auto"'
        )


def _pool(pool: SharedMemoryConfig, num_bytes: int) -> str:
    """What a pool's path has to offer. Raises TierError where the start would."""
    room = look_for_room(pool.root, num_bytes, pool.num_bytes)
    kept = f" and {room.kept_bytes / GIB:.1f} of earlier engines" if room.kept_bytes else ""
    return f"{pool.path}: {room.free_bytes / GIB:.1f} GiB free{kept}; it outlives the engine"


def _disk(tier: DiskConfig) -> str:
    """What a tier's path has to offer. Raises TierError where the start would."""
    found = probe(tier.root, tier.num_bytes)
    check_live(tier.root, tier.num_bytes)
    kept = f" and {found.kept_bytes / GIB:.1f} of earlier engines" if found.kept_bytes else ""
    how = "with O_DIRECT" if found.is_direct else "without O_DIRECT, which the file system refuses"
    return f"{tier.path}: {tier.gib:g} GiB, {found.free_bytes / GIB:.1f} free{kept}; reads and writes {how}"


def _store(tier: StoreConfig | MooncakeConfig) -> str:
    """What a store has to offer. Raises TierError where it cannot be had."""
    found = probe_store(tier)
    text = f"{tier}: answers in {1000 * found.seconds:.2f} ms, and keeps what is written"
    if found.policy and found.policy not in ("noeviction", "volatile-ttl"):
        text += f"; it evicts by {found.policy}, which leaves ends of chains behind: volatile-ttl does not"
    return text


def _read_settings(text: str) -> dict[str, Any]:
    try:
        settings = json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:  # a ValueError too for a number of thousands of digits
        raise OffloadError(
            f"--config {text[:200]!r} is not JSON ({error}); give one argument in single quotes, with double "
            f"quotes inside: '{{\"cpu_gib\": 8}}'"
        ) from None
    if not isinstance(settings, dict):
        raise OffloadError(f'--config {text[:200]!r} is not a JSON object; use for example {{"cpu_gib": 8}}')
    if "kv_connector" in settings:
        raise OffloadError(
            "--config has kv_connector, so it is the value of --kv-transfer-config; give what its "
            "kv_connector_extra_config is"
        )
    return settings


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """A JSON object, none of whose keys is given twice."""
    given = dict(pairs)
    if len(given) < len(pairs):
        [(key, _)] = Counter(key for key, _ in pairs).most_common(1)
        raise OffloadError(f"--config has {key!r} more than once; keep one of them")
    return given


def _admitted_vllm() -> str:
    """Its version, and why it may start."""
    try:
        from offload.vllm.versions import check_vllm_version
    except ModuleNotFoundError as missing:
        raise without_vllm(missing) from None
    admission = check_vllm_version()
    if admission.certificate is None:
        return admission.version
    return (
        f"{admission.version}, not tested, but certified on {admission.certificate.date} ({admission.path})"
    )


if __name__ == "__main__":
    sys.exit(main())
