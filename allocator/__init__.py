"""What is where: the prefix tree, the slots, the pins and the list of uncached blocks.

This package knows nothing of vLLM, CUDA or time. It decides and counts; it moves no bytes.
"""

from allocator.block_allocator import CpuOffloadingBlockAllocator
from allocator.departures import Cause
from allocator.errors import AllocatorError, CapacityError, ChainError, StalePlanError
from allocator.hashing import hash_chain
from allocator.node import Pin
from allocator.plans import BagEvicted, BagStored, Event, Evicted, Hit, Note, Stored, StorePlan, UncachedRun
from allocator.replay import Served, serve
from allocator.slot_pool import Slots

__distribution__ = "kv-offload"  # offload.siblings asks for this line
__all__ = [
    "AllocatorError",
    "BagEvicted",
    "BagStored",
    "CapacityError",
    "Cause",
    "ChainError",
    "CpuOffloadingBlockAllocator",
    "Event",
    "Evicted",
    "Hit",
    "Note",
    "Pin",
    "Served",
    "Slots",
    "StalePlanError",
    "StorePlan",
    "Stored",
    "UncachedRun",
    "hash_chain",
    "serve",
]
