"""What ``kv-offload check`` asks: would an engine so set start here? With the code of the start."""

import json
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from pydantic import TypeAdapter
from vllm import envs
from vllm.config import KVTransferConfig, VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.usage.usage_lib import UsageContext
from vllm.utils.argparse_utils import FlexibleArgumentParser

from offload.config import OffloadConfig
from offload.errors import ConfigError, OffloadError, UnsupportedError
from offload.vllm.plugin import CONNECTOR, PLUGIN, register
from offload.vllm.support import (
    bytes_to_take,
    check_connector,
    check_engine,
    check_machine,
    pool_bytes_here,
)
from offload.worker.pool.host_limits import check_host_memory, check_room

try:
    from vllm.entrypoints.common.cli_args import make_arg_parser
except ImportError:  # before vLLM 0.33
    from vllm.entrypoints.launchers.cli_args import make_arg_parser


class _ServeParser(FlexibleArgumentParser):
    """Of ``vllm serve``. Says what is wrong in one line, without the hundreds of lines of usage."""

    def error(self, message: str) -> NoReturn:
        raise UnsupportedError(
            f"vllm serve does not take these arguments: {message}; `vllm serve --help=all` lists all it takes"
        )


def flag_value(settings: Mapping[str, Any]) -> str:
    """The value of ``--kv-transfer-config`` for these settings, JSON in ASCII."""
    return json.dumps(
        {"kv_connector": CONNECTOR, "kv_role": "kv_both", "kv_connector_extra_config": settings}
    )


def check_settings(settings: Mapping[str, Any]) -> OffloadConfig:
    """Refuse settings with which no engine would start on this machine, whatever its model.

    Raises:
        OffloadError: as the start does.
    """
    _check_plugins()
    try:
        transfer = TypeAdapter(KVTransferConfig).validate_json(flag_value(settings))
    except ValueError as error:
        raise ConfigError(f"vLLM cannot read the settings: {error}") from None
    config = check_connector(transfer)
    assert config is not None
    check_host_memory(config)
    check_machine(config)
    check_room(bytes_to_take(config, config.cpu_bytes))
    return config


def check_arguments(arguments: Sequence[str], settings: Mapping[str, Any] | None) -> OffloadConfig:
    """Refuse arguments of ``vllm serve`` with which the engine would not start.

    vLLM reads them and configures an engine, for which it reads the model's configuration, not its weights.

    Args:
        arguments: those after ``vllm serve``.
        settings: of our connector; None where the arguments have ``--kv-transfer-config`` themselves.

    Raises:
        OffloadError: as the start does; UnsupportedError too for what vLLM itself refuses, and where no
            model is named: vLLM would take its default.
        SystemExit: the arguments ask for vLLM's help.
    """
    _check_plugins()
    register()
    parsed = _parse(arguments)
    if settings is not None:
        if parsed.kv_transfer_config is not None:
            raise ConfigError("the settings are given twice; give --config or --kv-transfer-config, not both")
        return check_arguments([*arguments, "--kv-transfer-config", flag_value(settings)], None)
    vllm_config = _configure(AsyncEngineArgs.from_cli_args(parsed))
    config = check_engine(vllm_config)
    if config is None:
        raise UnsupportedError(f"--kv-transfer-config does not name {CONNECTOR}; add it, or use --config")
    check_room(bytes_to_take(config, pool_bytes_here(vllm_config, config)))
    return config


def _parse(arguments: Sequence[str]) -> Any:
    """As ``vllm serve`` reads them; ``model`` is the one that is named."""
    parser = make_arg_parser(_ServeParser(prog="vllm serve"))
    parser.set_defaults(model=None)
    try:
        parsed = parser.parse_args(list(arguments))
    except OffloadError:
        raise
    except (ValueError, OSError, AssertionError) as error:  # of the file that vLLM's own --config names
        raise UnsupportedError(f"vLLM cannot read these arguments: {error}") from error
    parsed.model = parsed.model_tag or parsed.model
    if parsed.model is None:
        raise UnsupportedError(
            f"the arguments {shlex.join(arguments)!r} name no model; put it first: -- MODEL --block-size 16"
        )
    return parsed


def _configure(arguments: AsyncEngineArgs) -> VllmConfig:
    """As the start does it; the plug-in checks what comes of it."""
    try:
        return arguments.create_engine_config(UsageContext.OPENAI_API_SERVER)
    except OffloadError:
        raise
    except (ValueError, OSError, RuntimeError, NotImplementedError, AssertionError) as error:
        raise UnsupportedError(f"vLLM refuses these arguments: {error}") from error


def _check_plugins() -> None:
    """Refuse an environment in which vLLM would not know the connector.

    Raises:
        UnsupportedError: ``VLLM_PLUGINS`` leaves ours out.
    """
    allowed = envs.VLLM_PLUGINS
    if allowed is not None and PLUGIN not in allowed:
        raise UnsupportedError(
            f"VLLM_PLUGINS is {','.join(allowed)!r}, so vLLM does not load kv-offload; add {PLUGIN} to it"
        )
