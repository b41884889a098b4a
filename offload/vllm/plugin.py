"""The ``vllm.general_plugins`` entry point: makes the connector known by name.

vLLM calls connectors only after it has loaded the model. To refuse bad settings before that, the plugin
also checks every engine configuration as it is made (docs/decisions/0003).
"""

import copy
import functools
import logging
from typing import Any

from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.engine.arg_utils import EngineArgs

CONNECTOR = "CpuOffloadConnector"
PLUGIN = "cpu_offload"
"""Name of the entry point, as ``VLLM_PLUGINS`` may list it."""


def register() -> None:
    """Register the connector and the configuration check. vLLM calls this in every process, maybe twice."""
    _log_beside_vllm()
    if CONNECTOR not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector(CONNECTOR, "offload.vllm.entry", CONNECTOR)
    if not hasattr(EngineArgs.create_engine_config, "checked_by_kv_offload"):
        EngineArgs.create_engine_config = _with_check(EngineArgs.create_engine_config)


class _BesideVllm(logging.Handler):
    """Gives our lines to vLLM's logger, and says in each whose it is."""

    def emit(self, record: logging.LogRecord) -> None:
        named = copy.copy(record)
        named.msg = f"kv-offload: {record.msg}"
        logging.getLogger("vllm").handle(named)


def _log_beside_vllm() -> None:
    """Our lines go where vLLM's go, from the same level on, unless a handler for them is set up already.

    vLLM sets up the logger of its own name only: of others nothing below a warning would be seen.
    """
    for package in ("offload", "allocator", "evictor"):
        ours = logging.getLogger(package)
        if not ours.hasHandlers():
            ours.parent, ours.propagate = logging.getLogger("vllm"), False
            ours.addHandler(_BesideVllm())


def _with_check(create: Any) -> Any:
    @functools.wraps(create)
    def create_engine_config(arguments: EngineArgs, *args: Any, **kwargs: Any) -> VllmConfig:
        if CONNECTOR not in str(arguments.kv_transfer_config):
            return create(arguments, *args, **kwargs)
        from offload.vllm.versions import check_vllm_version

        check_vllm_version()
        from offload.vllm.support import check_before_start, check_not_replaced

        check_not_replaced(arguments)
        vllm_config: VllmConfig = create(arguments, *args, **kwargs)
        check_before_start(vllm_config)
        return vllm_config

    create_engine_config.checked_by_kv_offload = True  # type: ignore[attr-defined]
    return create_engine_config
