"""vLLM's engine core asks for work in one place when it shuts down, and that is seen."""

from typing import Any

from vllm.v1.engine.core import EngineCoreProc, EngineShutdownState

from offload.vllm.engine import VllmEngine


class _Core:
    """As much of an engine core as it takes to shut down."""

    def __init__(self, state: EngineShutdownState) -> None:
        self.shutdown_state = state
        self.seen: list[bool] = []

    def has_work(self) -> bool:
        return self.has_requests()

    def has_requests(self) -> bool:
        return self.has_pending_push_work()

    def has_pending_push_work(self) -> bool:
        self.seen.append(VllmEngine.is_ending(None))  # type: ignore[arg-type]
        return False


def test_a_shutdown_is_seen_and_nothing_else() -> None:
    core: Any = _Core(EngineShutdownState.SHUTTING_DOWN)
    assert not EngineCoreProc._handle_shutdown(core), "vLLM's own, which ends as there is no work"
    assert core.seen == [True]
    core = _Core(EngineShutdownState.RUNNING)
    assert EngineCoreProc._handle_shutdown(core)
    assert core.seen == []
    core.has_work()
    assert core.seen == [False]
