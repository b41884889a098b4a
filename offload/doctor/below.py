"""What is wrong with tiers, and with peers."""

import os
from collections.abc import Iterator
from pathlib import Path

from offload.doctor.finding import Finding, Told, by_label, lately, listed, minutes
from offload.settings import GIB

_FREE_SHARE = 0.02
_NORMAL = ("cheaper_to_compute",)
"""Reasons not to fetch that are as they should be."""


def tiers_wrong(told: Told) -> Iterator[Finding]:
    """By the engine's word."""
    refused = by_label(told["counters"]["lately"], "route_refused_bytes")
    for tier in told["tiers"]:
        if tier.get("is_private"):
            yield Finding(
                "tier-private",
                f"since a reset, {tier.get('tier', 'a tier')} keeps what this engine writes for nobody "
                f"else, and gives nothing that was there before",
                "reset again, and name the weights before anything is computed: kv-offload reset "
                "--weights-version NAME; or restart the engine",
            )
        num_bytes = refused.get(f"pool_to_{tier.get('tier')}", 0)
        if num_bytes and tier.get("budget_bytes", 0) < tier.get("extent_bytes", 0):
            yield Finding(
                "tier-budget-spent",
                f"the tier {tier['tier']} may write no more now: {num_bytes / GIB:.3g} GiB were refused in "
                f"{minutes(told)}",
                'raise write_gib_per_day if the disk endures it, or set admit to "second-use"',
            )


def disks_full(told: Told) -> Iterator[Finding]:
    """Looks at the tiers' directories, where they are."""
    for tier in told["tiers"]:
        if tier.get("kind") != "disk":
            continue
        path = Path(tier["path"])
        try:
            found = os.statvfs(path)
        except OSError as error:
            yield Finding(
                "tier-gone",
                f"the directory {path} of the tier {tier['tier']} cannot be seen: {error.strerror or error}",
                "mount it again and restart the engine",
            )
            continue
        free, size = found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize
        if free < _FREE_SHARE * size:
            yield Finding(
                "tier-disk-full",
                f"{free / GIB:.3g} of {size / GIB:.3g} GiB are free where {path} lies",
                f"make room: kv-offload tier ls {path} lists what engines keep there, and tier gc {path} "
                f"--gib N deletes what no engine owns; look at what else writes there",
            )


def peers_away(told: Told) -> Iterator[Finding]:
    """Peers that are not connected, each with its reason."""
    for peer in told["peers"]:
        if peer["state"] != "connected":
            yield Finding(
                "peer-not-connected",
                f"peer {peer['address']} is {peer['state']}: {peer['reason'] or 'it says no reason'}",
                "is that engine up, and reachable from here? Both need one fleet_key_file, fleet_tls, "
                "model, vLLM and hash algorithm: kv-offload peers there says how it sees this one",
            )


def hand_offs_wrong(told: Told) -> Iterator[Finding]:
    """What was handed over is not used, or is not handed over."""
    unused = by_label(told["counters"]["lately"], "unused_hand_offs")
    unused = {reason: count for reason, count in unused.items() if reason not in _NORMAL}
    if sum(unused.values()) > lately(told, "received_hand_offs"):
        yield Finding(
            "hand-offs-unused",
            f"of prompts that peers had computed for this engine, most were not fetched in {minutes(told)}: "
            f"{listed(unused)}",
            'docs/using.md, "What was handed over", says what each reason means',
        )
    refused = lately(told, "refused_hand_offs")
    if refused > 0:
        yield Finding(
            "hand-offs-refused",
            f"{refused:,.0f} prompts were not handed off in {minutes(told)}",
            "answers say why in cpu_offload_refused; often cpu_gib or lease_share is too small, or "
            "lease_seconds too long",
        )
