"""Which leaf to evict: eviction policies over opaque leaves.

This package knows nothing of blocks, slots or tensors. It ranks the leaves of the caller's tree. The
caller says what a leaf is, and how much of it is evicted.
"""

from evictor.arc import ArcPolicy
from evictor.fifo import FifoPolicy
from evictor.hazard import HazardPolicy
from evictor.hinted import HintedPolicy
from evictor.hints import KeepHints, Worth
from evictor.lfu import LfuPolicy
from evictor.lru import LruPolicy
from evictor.policy import Admission, EvictionPolicy, Newcomer
from evictor.registry import UnknownPolicyError, available_policies, make_policy, register_policy
from evictor.s3fifo import S3FifoPolicy

__distribution__ = "kv-offload"  # offload.siblings asks for this line
__all__ = [
    "Admission",
    "ArcPolicy",
    "EvictionPolicy",
    "FifoPolicy",
    "HazardPolicy",
    "HintedPolicy",
    "KeepHints",
    "LfuPolicy",
    "LruPolicy",
    "Newcomer",
    "S3FifoPolicy",
    "UnknownPolicyError",
    "Worth",
    "available_policies",
    "make_policy",
    "register_policy",
]
