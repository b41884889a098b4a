"""vLLM calls a connector for each attention layer, unless it has no metadata."""

from typing import Any

import pytest
from vllm.model_executor.layers.attention import attention, kv_transfer_utils

from offload.vllm.connector import CpuOffloadConnector


class Layered:
    """Which hooks were called."""

    has_connector_metadata = CpuOffloadConnector.has_connector_metadata

    def __init__(self) -> None:
        self.called: list[str] = []

    def wait_for_layer_load(self, layer_name: str) -> None:
        self.called.append("wait_for_layer_load")

    def save_kv_layer(self, *_: Any) -> None:
        self.called.append("save_kv_layer")


@pytest.mark.parametrize("has_metadata", [False, True])
def test_a_layer_calls_hooks_only_where_there_is_metadata(
    monkeypatch: pytest.MonkeyPatch, has_metadata: bool
) -> None:
    """With vLLM's own wrapper around a layer; the rest of the engine is not there."""
    connector = Layered()
    if has_metadata:
        monkeypatch.setattr(connector, "has_connector_metadata", lambda: True)
    for name, value in (
        ("has_kv_transfer_group", True),
        ("is_v1_kv_transfer_group", True),
        ("get_kv_transfer_group", connector),
    ):
        monkeypatch.setattr(kv_transfer_utils, name, lambda value=value: value)
    monkeypatch.setattr(attention, "get_attention_context", lambda name: (object(), None, None, None))

    def forward(query: int, layer_name: str) -> int:
        return query + 1

    assert kv_transfer_utils.maybe_transfer_kv_layer(forward)(1, "layer.0") == 2
    assert connector.called == (["wait_for_layer_load", "save_kv_layer"] if has_metadata else [])
