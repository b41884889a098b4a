"""The entry point that makes the connector known."""

from importlib.metadata import entry_points

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.engine.arg_utils import EngineArgs

from offload.vllm import plugin
from offload.vllm.connector import CpuOffloadConnector


def test_vllm_finds_the_plugin() -> None:
    found = [point for point in entry_points(group="vllm.general_plugins") if point.name == "cpu_offload"]
    assert found, "kv-offload is not installed here: run make setup"
    assert all(point.load() is plugin.register for point in found)


def test_registering_again_changes_nothing() -> None:
    plugin.register()
    once = EngineArgs.create_engine_config
    plugin.register()
    assert EngineArgs.create_engine_config is once


def test_the_connector_is_known_by_name() -> None:
    plugin.register()
    assert KVConnectorFactory.get_connector_class_by_name(plugin.CONNECTOR) is CpuOffloadConnector
