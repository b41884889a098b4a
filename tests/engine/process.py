"""An ``Engine`` in a process of its own."""

from functools import partial
from pathlib import Path
from typing import Any

from offload.testing.engines import process
from offload.testing.engines.environment import ENVIRONMENT
from tests.engine.engine import Engine

_CALL_SECONDS = 240


class EngineProcess(process.EngineProcess[Engine]):
    """Its output goes to the file ``log``. EngineError if it does not end well."""

    def __init__(self, log: Path, extra_config: dict[str, Any] | None, **settings: Any) -> None:
        """``extra_config`` and ``settings`` are those of ``Engine``."""
        may_fork = not Path("/dev/nvidia0").exists()
        super().__init__(
            partial(Engine, extra_config, **settings),
            log=log,
            variables=ENVIRONMENT,
            fork_from=[process.IMPORTS] if may_fork else [],
            call_seconds=_CALL_SECONDS,
            must_end_well=True,
        )
