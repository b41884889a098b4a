"""Moving bytes and talking to the engine: configuration, jobs, plans, transfers, the vLLM connector."""

from offload.config import OffloadConfig
from offload.errors import (
    ConfigError,
    HostMemoryError,
    OffloadError,
    TraceError,
    UnsupportedError,
)

__all__ = [
    "ConfigError",
    "HostMemoryError",
    "OffloadConfig",
    "OffloadError",
    "TraceError",
    "UnsupportedError",
]
