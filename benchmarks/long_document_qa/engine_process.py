"""An `Engine` of one mode in a process of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from benchmarks.long_document_qa.engine import Engine
from benchmarks.long_document_qa.environment import variables_of
from benchmarks.long_document_qa.measure import RoundResult
from benchmarks.long_document_qa.settings import Settings
from benchmarks.long_document_qa.workload import Prompt
from offload.testing.engines import process

__all__ = ["EngineProcess"]


class EngineProcess(process.EngineProcess[Engine]):
    """A context manager: see its base.

    Args:
        settings, mode: as for `Engine`.
        on_wait: called in this process, once a second, while the engine is starting.
        make: the class to make over there.
    """

    def __init__(
        self,
        settings: Settings,
        mode: str,
        on_wait: Callable[[], None] = lambda: None,
        make: Callable[[Settings, str], Engine] = Engine,
    ) -> None:
        super().__init__(
            partial(make, settings, mode),
            mode,
            variables=variables_of(settings),
            fork_from=[process.IMPORTS] if settings.in_process else [],
            on_wait=on_wait,
        )
        self.mode = mode
        self.on_done: Callable[[], None] = lambda: None
        """Called in this process whenever the engine has answered a request."""

    def warm_up(self) -> None:
        """See `Engine.warm_up`."""
        self.run_told(self.on_done, Engine.warm_up)

    def reset(self) -> None:
        """See `Engine.reset`."""
        self.run(Engine.reset)

    def run_round(self, prompts: Sequence[Prompt]) -> RoundResult:
        """See `Engine.run_round`."""
        return self.run_told(self.on_done, Engine.run_round, list(prompts))
