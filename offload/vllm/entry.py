"""Where the connector is loaded from: says so if the vLLM at hand is not one it was made for.

Other modules of this folder import vLLM's internals, which move between releases; this one asks first.
"""

from offload.vllm.versions import check_vllm_version

check_vllm_version()

from offload.vllm.connector import CpuOffloadConnector  # noqa: E402

__all__ = ["CpuOffloadConnector"]
