"""Which leaf goes first: eviction policies over opaque leaves.

This package knows nothing of blocks, slots or tensors. It ranks the leaves of somebody's tree; what a
leaf is, and how much of it goes, is for the caller to say.
"""

from evictor.hazard import HazardPolicy
from evictor.hinted import HintedPolicy, KeepHints, Worth
from evictor.lru import LruPolicy
from evictor.policy import EvictionPolicy, Newcomer
from evictor.registry import UnknownPolicyError, available_policies, make_policy, register_policy

__all__ = [
    "EvictionPolicy",
    "HazardPolicy",
    "HintedPolicy",
    "KeepHints",
    "LruPolicy",
    "Newcomer",
    "UnknownPolicyError",
    "Worth",
    "available_policies",
    "make_policy",
    "register_policy",
]
