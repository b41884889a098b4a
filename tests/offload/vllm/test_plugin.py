"""The entry point that makes the connector known."""

import subprocess
import sys
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


_LOGS = """
import logging, sys
if sys.argv[1] == "own":
    logging.basicConfig(format="own: %(message)s", level=logging.INFO)
from offload.vllm import plugin
plugin.register()
plugin.register()
if sys.argv[1] == "vllm's":  # it does so after it has loaded plug-ins
    from vllm.config.logging import LoggingConfig
    from vllm.logger import configure_logging
    configure_logging(LoggingConfig())
for package in ("offload.worker.side", "evictor.hinted"):
    logging.getLogger(package).info("a line of %s", "ours")
    logging.getLogger(package).debug("too much")
"""


def test_our_lines_stand_among_those_of_vllm() -> None:
    def lines(setup: str) -> list[str]:
        done = subprocess.run(
            [sys.executable, "-c", _LOGS, setup], capture_output=True, text=True, check=True
        )
        return [line for line in (done.stdout + done.stderr).splitlines() if "ours" in line or "much" in line]

    of_vllm = lines("vllm's")
    assert len(of_vllm) == 2
    assert all("INFO" in line and line.endswith("kv-offload: a line of ours") for line in of_vllm)
    assert lines("own") == ["own: a line of ours"] * 2
