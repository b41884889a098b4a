"""Proxies that others put in front of prefill and decode engines, each in a process of its own."""

from offload.testing.proxies.process import ProxyError, ProxyProcess
from offload.testing.proxies.routers import ROUTER_FOLDER, has_vllm_router, toy_like, toy_proxy, vllm_router

__all__ = [
    "ROUTER_FOLDER",
    "ProxyError",
    "ProxyProcess",
    "has_vllm_router",
    "toy_like",
    "toy_proxy",
    "vllm_router",
]
