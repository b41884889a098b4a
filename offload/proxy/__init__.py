"""``kv-offload proxy``: one address for many engines. Imports neither torch nor vLLM."""

from offload.proxy.policies import Engine, Fleet, Policy, Request, Route

__all__ = ["Engine", "Fleet", "Policy", "Request", "Route"]
