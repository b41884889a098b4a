"""Traces of chains of one block: where segments are blocks, a policy is what its paper says."""

import random

from allocator import CpuOffloadingBlockAllocator, serve
from evictor import make_policy


def flat_trace(rng: random.Random, num_requests: int) -> list[str]:
    """A few names often, many seldom, what is popular changes halfway, and now and then a scan."""
    trace: list[str] = []
    while len(trace) < num_requests:
        shift = 20 if len(trace) > num_requests // 2 else 0
        trace.append(f"name {int(rng.paretovariate(0.7)) % 40 + shift}")
        if rng.random() < 0.02:
            trace += [f"scan {rng.randrange(30)}" for _ in range(12)]
    return trace


def hits_of(policy: str, trace: list[str], capacity: int) -> int:
    allocator = CpuOffloadingBlockAllocator(capacity, policy=make_policy(policy, capacity))
    hits = 0
    for name in trace:
        chain = [f"{name:<16}".encode()]  # prefix hashes are all of one length
        hits += serve(allocator, chain).depth
    return hits
