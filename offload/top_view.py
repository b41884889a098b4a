"""What ``kv-offload top`` shows of an engine: figures of an interval, and lines made of them."""

from typing import NamedTuple

from offload.doctor.finding import Told, by_label
from offload.settings import GIB

_BAR = 20
_NOT_WRONG = "nothing seen; kv-offload doctor looks at the machine, too"


class Flow(NamedTuple):
    """What an engine did in an interval.

    Attributes:
        seconds: how long that was; 0: it made no step.
        prompt_tokens: of prompts that were admitted.
        local_tokens: of these, those that the GPU had.
        restored_tokens: those that came from the pool.
        evicted_blocks: from the pool.
        route_bytes: that were copied, by route.
    """

    seconds: float
    prompt_tokens: float
    local_tokens: float
    restored_tokens: float
    evicted_blocks: float
    route_bytes: dict[str, float]

    def per_second(self, amount: float) -> float:
        """Of this interval."""
        return amount / self.seconds if self.seconds > 0 else 0.0


def flow_between(before: Told | None, now: Told) -> Flow:
    """What an engine did from one answer to the next one; without the first, in the last minutes."""
    if before is None or before["engine"] != now["engine"]:
        grown, seconds = now["counters"]["lately"], now["counters"]["lately_seconds"]
    else:
        old, new = before["counters"]["total"], now["counters"]["total"]
        grown = {key: value - old.get(key, 0) for key, value in new.items()}
        seconds = _told_at(now) - _told_at(before)
    return Flow(
        seconds,
        grown.get("prompt_tokens", 0),
        grown.get("local_tokens", 0),
        grown.get("restored_tokens", 0),
        grown.get("evicted_blocks", 0),
        by_label(grown, "route_bytes"),
    )


def lines_of(told: Told, flow: Flow, wrong: list[str]) -> list[tuple[str, str]]:
    """Labels and what stands behind them, for people.

    Args:
        told: how the engine stands.
        flow: what it did.
        wrong: names of what the doctor finds by the engine's word.
    """
    about, pool, jobs = told["about"], told["pool"], told["jobs"]
    lines = [
        (
            "engine",
            f"{told['engine']}, up {told['uptime_seconds']:,.0f} s, as of {told['age_seconds']:.1f} s ago, "
            f"{about['model']}, vLLM {about['vllm']}, kv-offload {about['kv_offload']}",
        )
    ]
    if pool is None or jobs is None:
        return [*lines, ("pool", "is yet to be made: no step has begun")]
    share = pool["num_used_blocks"] / pool["num_blocks"]
    filled = round(share * _BAR)
    lines += [
        (
            "pool",
            f"{'#' * filled}{'.' * (_BAR - filled)} {share:.1%} of {pool['num_blocks']:,} blocks, "
            f"{pool['num_bytes'] / GIB:.2f} GiB; {flow.per_second(flow.evicted_blocks):,.0f} evicted/s",
        ),
        ("tokens", _tokens(flow)),
        ("copies", _copies(told, flow)),
        (
            "jobs",
            f"{jobs['num_in_flight']} in flight, {jobs['num_stuck']} stuck, {jobs['num_queued_blocks']} "
            f"blocks "
            f"wait to be stored, {told['leases']['num_leases']} leases",
        ),
    ]
    for tier in told["tiers"]:
        if "num_places" in tier:
            name = tier.get("tier", "tier")
            lines.append(("tier", f"{name}: {tier['num_extents']:,} of {tier['num_places']:,} extents"))
    if told["peers"]:
        num_connected = sum(each["state"] == "connected" for each in told["peers"])
        lines.append(("peers", f"{num_connected} of {len(told['peers'])} connected"))
    doctor = f"{', '.join(wrong)}; kv-offload doctor says what to do" if wrong else _NOT_WRONG
    return [*lines, ("wrong", doctor)]


def _told_at(told: Told) -> float:
    """When it was so, in seconds since the engine's start."""
    return float(told["uptime_seconds"] - told["age_seconds"])


def _tokens(flow: Flow) -> str:
    if not flow.prompt_tokens:
        return "none asked for"
    local = flow.local_tokens / flow.prompt_tokens
    restored = flow.restored_tokens / flow.prompt_tokens
    return (
        f"{flow.per_second(flow.prompt_tokens):,.0f}/s asked for: {local:.1%} on the GPU, {restored:.1%} "
        f"from the pool, {max(0.0, 1 - local - restored):.1%} computed"
    )


def _copies(told: Told, flow: Flow) -> str:
    paused = {each["route"] for each in told["routes"] if each["is_paused"]}
    parts = [f"{route} {flow.per_second(n) / 1e6:,.1f} MB/s" for route, n in sorted(flow.route_bytes.items())]
    parts += [f"{route} pauses" for route in sorted(paused)]
    return ", ".join(parts) or "none"
