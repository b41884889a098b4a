"""Moving bytes and talking to the engine: configuration, jobs, plans, transfers, the vLLM connector."""

from offload.siblings import check_siblings as _check_siblings

_check_siblings()

from offload.config import OffloadConfig  # noqa: E402
from offload.errors import (  # noqa: E402
    ConfigError,
    HostMemoryError,
    OffloadError,
    TraceError,
    UnsupportedError,
)
from offload.transfer_params import KVTransferParams  # noqa: E402

__all__ = [
    "ConfigError",
    "HostMemoryError",
    "KVTransferParams",
    "OffloadConfig",
    "OffloadError",
    "TraceError",
    "UnsupportedError",
]
