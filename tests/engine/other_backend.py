"""What a worker with another attention backend looks like: importing this gives its layers one."""

from typing import Any

from vllm.model_executor.layers.attention import Attention

from tests.engine.worker_probe import WorkerProbe


class OtherBackend(WorkerProbe):
    """Computes what the first one does, and has another name."""


_of_layer = Attention.get_attn_backend
_others: dict[type, type] = {}


def _other(layer: Attention) -> Any:
    backend = _of_layer(layer)
    return _others.setdefault(backend, type(f"Other{backend.__name__}", (backend,), {}))


Attention.get_attn_backend = _other  # type: ignore[method-assign]
