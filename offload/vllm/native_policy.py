"""The name under which vLLM's configuration finds the hazard policy; it lives in ``offload.vllm.native``."""

from offload.vllm.native.policy import HazardCachePolicy

__all__ = ["HazardCachePolicy"]
