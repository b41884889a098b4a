"""The entry point that makes the connector known."""

import re
from importlib.metadata import entry_points

import pytest
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.engine.arg_utils import EngineArgs

from offload import UnsupportedError
from offload.vllm import plugin
from offload.vllm.connector import CpuOffloadConnector
from offload.vllm.versions import SUPPORTED, check_vllm_version
from tests.test_architecture import ROOT


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


@pytest.mark.parametrize(
    ("script", "variable", "supported"),
    [
        ("setup", "build=cuda vllm_version", SUPPORTED[-1]),
        ("setup", "build=cpu vllm_version", SUPPORTED[-2]),
        ("setup-oldest", "version", SUPPORTED[0]),
        ("setup-newest", "version", SUPPORTED[-1]),
    ],
)
def test_what_is_supported_is_tested(script: str, variable: str, supported: tuple[int, int]) -> None:
    [version] = re.findall(rf"^ *{variable}=(\S+)", (ROOT / ".ci" / script).read_text(), re.MULTILINE)
    assert tuple(map(int, version.split(".")[:2])) == supported


def test_supported_versions_are_told() -> None:
    assert check_vllm_version("0.31.2") == "0.31.2"
    assert check_vllm_version("0.33.7") == "0.33.7"
    with pytest.raises(UnsupportedError, match=r"0\.31\.\*, 0\.32\.\*, 0\.33\.\*"):
        check_vllm_version("0.30.0")
