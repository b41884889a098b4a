"""HTTP engines in memory with vLLM's API, for tests of what stands in front of engines."""

from offload.testing.upstream.faults import Fault, Faults
from offload.testing.upstream.server import Received, Upstream
from offload.testing.upstream.words import EOS, answer, decode, encode, next_token, render

__all__ = [
    "EOS",
    "Fault",
    "Faults",
    "Received",
    "Upstream",
    "answer",
    "decode",
    "encode",
    "next_token",
    "render",
]
