"""What an engine's own word shows to be wrong: its pool, its copies, its settings."""

from collections.abc import Iterator

from offload.doctor.finding import Finding, Told, by_label, lately, listed, minutes, tier_of
from offload.fleet_config import IN_CLEAR
from offload.provenance import own_version
from offload.settings import GIB

_FAILURES = 8
"""Fewer in some minutes are dealt with, and cost a miss each."""
_LEAST_BLOCKS = 64
_DROPPED_SHARE = 0.1
"""Of those that are stored, as the alert has it."""
_FOUND_SHARE = 0.1
_BIGGER = 4
"""Times the GPU's cache: a pool to begin with."""


def pool_too_small(told: Told) -> Iterator[Finding]:
    """No larger than the GPU's cache, turned over meanwhile, and few tokens are found in it."""
    pool, num_gpu = told["pool"], told["settings"]["num_gpu_blocks"]
    if pool is None or not num_gpu or pool["num_blocks"] > num_gpu:
        return
    asked, found = (
        lately(told, "prompt_tokens") - lately(told, "local_tokens"),
        lately(told, "restored_tokens"),
    )
    if lately(told, "evicted_blocks") >= pool["num_blocks"] and found < _FOUND_SHARE * asked:
        gib = pool["num_bytes"] / GIB * _BIGGER * num_gpu / pool["num_blocks"]
        yield Finding(
            "pool-too-small",
            f"the pool has {pool['num_blocks']:,} blocks and the GPU's cache {num_gpu:,}; in {minutes(told)} "
            f"{found / asked:.1%} of what the GPU lacked came from it, and all of it was evicted",
            f"raise cpu_gib, to begin with to {gib:.3g}, or as far as the machine has room; kv-offload "
            f"resize does it while the engine runs, up to cpu_gib_max; record_trace and kv-offload size say "
            f"which size pays",
        )


def routes_paused(told: Told) -> Iterator[Finding]:
    """Copies along a route keep failing."""
    for route in told["routes"]:
        if route["is_paused"]:
            yield Finding(
                "route-paused",
                f"{route['route']} pauses after faults; requests are served without it",
                f'the engine\'s log has the fault ("pause"); {_remedy(told, route["route"])}',
            )


def jobs_stuck(told: Told) -> Iterator[Finding]:
    """Copies are past their deadline."""
    if told["jobs"] and told["jobs"]["num_stuck"]:
        yield Finding(
            "stuck-jobs",
            f"{told['jobs']['num_stuck']} copies are past their deadline, and keep GPU blocks and slots",
            "look for faults of the GPU, or of what the tiers are on; if it does not fall in minutes, "
            "restart the engine",
        )


def jobs_failing(told: Told) -> Iterator[Finding]:
    """Copies fail, one after the other."""
    failed = by_label(told["counters"]["lately"], "route_failed_jobs")
    paused = {each["route"] for each in told["routes"] if each["is_paused"]}
    failed = {route: count for route, count in failed.items() if route not in paused}
    if sum(failed.values()) >= _FAILURES:
        worst = max(failed, key=lambda route: failed[route])
        yield Finding(
            "failing-jobs",
            f"jobs that failed in {minutes(told)}: {listed(failed)}; each costs a miss",
            f'the engine\'s log says why ("since the last such line"); {_remedy(told, worst)}',
        )


def checksums_differ(told: Told) -> Iterator[Finding]:
    """Bytes came back that were not those stored, at any time since the start."""
    broken = by_label(told["counters"]["total"], "route_broken_jobs")
    if broken:
        worst = max(broken, key=lambda route: broken[route])
        yield Finding(
            "checksums-differ",
            f"jobs whose bytes were not those stored, since the start: {listed(broken)}; none was served",
            f'suspect the hardware, and set verify_loads to "always" until it is known; '
            f"{_remedy(told, worst)}",
        )


def stores_dropped(told: Told) -> Iterator[Finding]:
    """Much of what should be stored is not, since copies do not keep up."""
    pool = told["pool"]
    if pool is None:
        return
    names = ("unstored_blocks_gave_way", "unstored_blocks_overdue")
    dropped = lately(told, *names)
    stored = lately(told, "stored_bytes") * pool["num_blocks"] / pool["num_bytes"]
    if dropped >= _LEAST_BLOCKS and dropped > _DROPPED_SHARE * stored:
        yield Finding(
            "stores-dropped",
            f"{dropped:,.0f} blocks were not stored in {minutes(told)}, beside {stored:,.0f} that were: the "
            f"copies to the pool did not keep up, or requests needed the GPU's blocks",
            "kv-offload status shows the link's speed: compare it with benchmarks.copy_bandwidth; give the "
            'GPU more blocks (--gpu-memory-utilization), or set store_decode_blocks to "auto" or false',
        )


def settings_wrong(told: Told) -> Iterator[Finding]:
    """Versions and settings."""
    about, settings = told["about"], told["settings"]
    if not about["vllm_is_tested"]:
        yield Finding(
            "vllm-not-tested",
            f"vLLM {about['vllm']} runs by a certificate; kv-offload {about['kv_offload']} was not tested "
            f"with it",
            "install a release of kv-offload that was, or a vLLM that docs/using.md names",
        )
    if about["kv_offload"] != own_version():
        yield Finding(
            "other-version",
            f"the engine runs kv-offload {about['kv_offload']}, and {own_version()} is installed here",
            "restart the engine if kv-offload was upgraded since it started; else run the doctor of its "
            "version",
        )
    algorithm, trace = settings["hash_algorithm"], settings["record_trace"]
    if trace is not None and algorithm.startswith("xxhash") and not settings["has_hash_seed"]:
        yield Finding(
            "hashes-unseeded",
            f"prefix_caching_hash_algo is {algorithm}, and PYTHONHASHSEED is not set: what record_trace "
            f"writes to {trace} has other hashes after each start",
            "set PYTHONHASHSEED to a number, the same for all engines, or --prefix-caching-hash-algo "
            "sha256_cbor",
        )
    if settings["is_in_clear"]:
        yield Finding(
            "fleet-in-clear",
            f"listen is {settings['listen']}, and {IN_CLEAR.partition('.')[0]}",
            "set fleet_tls (docs/using.md), or see that nobody else reads this network",
        )


def _remedy(told: Told, route: str) -> str:
    tier = tier_of(told, route)
    if tier is None:
        return "look for errors of the GPU (dmesg, nvidia-smi) and of the host's memory"
    if "path" in tier:
        return f"kv-offload tier check {tier['path']} reads all that it keeps; dmesg has errors of the disk"
    if "url" in tier:
        return f"is {tier['url']} up? kv-offload check asks it with the engine's configuration"
    return "kv-offload peers says how they stand"
