"""What must hold at the end with any connector: the scheduler has forgotten everybody."""

from typing import TYPE_CHECKING, Any

from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

from offload.testing.virtual.gpu_cache import GpuCache

if TYPE_CHECKING:
    from offload.testing.virtual.engine import VirtualEngine


class SchedulerAudit:
    """Watches one engine, whatever its connector. What requests attend to, the runner checks."""

    def __init__(self, engine: "VirtualEngine") -> None:
        self._engine = engine
        self._gpu_cache = GpuCache(engine)
        self.pool_epoch = 0
        """Counts resets of the pool."""
        self.explain_failures = False
        """Whether the copiers' own faults are the only ones."""

    def remember(self, before: "SchedulerAudit") -> None:
        """An earlier engine was over the same memory; of this one there is nothing to remember."""

    def follow(self, request: Request) -> None:
        """A request was sent."""
        self._gpu_cache.follow(request)

    def see_plan(self, plan: Any) -> None:
        """The connector's scheduler side has spoken."""

    def see_report(self, output: KVConnectorOutput | None, pool_epoch: int) -> None:
        """Workers have spoken, in a step planned at ``pool_epoch``."""

    def pool_was_reset(self) -> None:
        """The connector's cache was reset."""
        self.pool_epoch += 1

    def after_step(self) -> None:
        """A step has ended."""

    def check_at_rest(self) -> None:
        """The engine has gone to sleep: what is in flight now will never be heard of."""
        assert not self._engine.jobs, f"jobs left: {self._engine.jobs}"

    def check_drained(self) -> None:
        """Everybody has let go of everything."""
        engine, scheduler = self._engine, self._engine.scheduler
        assert not scheduler.requests, f"requests left: {list(scheduler.requests)}"
        assert not engine.jobs, f"jobs left: {engine.jobs}"
        pool = scheduler.kv_cache_manager.block_pool
        held = [block.block_id for block in pool.blocks if block.ref_cnt and not block.is_null]
        histories = "\n".join(engine.history.of_block(block_id) for block_id in held[:1])
        assert not held, f"GPU blocks {held} are still held\n{histories}"
        assert pool.get_num_free_blocks() == engine.settings.gpu_blocks - 1
        engine.runner.check_drained()

    def check_gpu_cache(self) -> None:
        """What the GPU remembers is right; only where no test has put its hands on it."""
        self._gpu_cache.check()
