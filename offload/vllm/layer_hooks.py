"""vLLM's hooks for each attention layer, none of which is called."""

from typing import Any


class NoLayerHooks:
    """Loads run between steps, and stores are made of whole blocks after a step: no layer waits for either.

    Where a connector has no metadata, vLLM calls it for no layer. On 32 layers that is 64 calls a step.
    """

    def has_connector_metadata(self) -> bool:
        return False

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        pass
