"""A connector whose hooks do nothing: what vLLM itself spends on having one.

kv_connector = "BareConnector", kv_connector_module_path = "benchmarks.common.bare_connector"
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)

from offload.vllm.layer_hooks import NoLayerHooks

__all__ = ["BareConnector"]


class BareConnector(NoLayerHooks, KVConnectorBase_V1, SupportsHMA):
    """Has what vLLM demands of a connector, and nothing else; no layer calls it."""

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        return 0, False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        pass

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        return KVConnectorMetadata()

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return False, None

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass
