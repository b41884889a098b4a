"""Proxies in front of prefill and decode engines, ours and those of others, in processes of their own."""

from offload.testing.proxies.process import ProxyError, ProxyProcess
from offload.testing.proxies.routers import (
    ROUTER_FOLDER,
    has_vllm_router,
    kv_offload_proxy,
    toy_like,
    toy_proxy,
    vllm_router,
)

__all__ = [
    "ROUTER_FOLDER",
    "ProxyError",
    "ProxyProcess",
    "has_vllm_router",
    "kv_offload_proxy",
    "toy_like",
    "toy_proxy",
    "vllm_router",
]
