"""Whether a store of either kind can be had."""

from offload.mooncake_config import MooncakeConfig
from offload.store_config import StoreConfig
from offload.worker.media.mooncake_check import probe_mooncake
from offload.worker.media.resp_check import StoreProbe
from offload.worker.media.resp_check import probe_store as probe_resp


def probe_store(tier: StoreConfig | MooncakeConfig) -> StoreProbe:
    """Write a MiB, read it back, and delete it. Raises as ``probe_resp`` and ``probe_mooncake``."""
    return probe_mooncake(tier) if isinstance(tier, MooncakeConfig) else probe_resp(tier)
