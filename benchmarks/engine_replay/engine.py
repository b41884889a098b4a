"""The replay engine: vLLM's real scheduler and one connector, driven step by step on a virtual clock."""

from __future__ import annotations

import gc
import hashlib
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from vllm.config import VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.gc_utils import freeze_gc_heap
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.engine import EngineCoreOutput
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request

from benchmarks.common.stopwatch import Stopwatch
from benchmarks.engine_replay.phases import PHASES
from benchmarks.engine_replay.simple import VirtualSimpleWorker
from offload.config import AUTO, DEFAULT_POLICY
from offload.testing.copiers.paced import Link, Pace, PacedCopier, VirtualClock
from offload.testing.engines.environment import transfer_config
from offload.testing.virtual.groups import Group
from offload.testing.virtual.native import use_copier
from offload.testing.virtual.parts import make_cache, make_hash, make_scheduler, make_worker, tell_sizes
from offload.testing.virtual.rank import end_step
from offload.testing.virtual.settings import (
    VirtualSettings,
    make_kv_cache_config,
    make_vllm_config,
)
from offload.vllm.places import Place

CONNECTORS = ("none", "native", "native-lru", "native-arc", "simple", "offload")
"""`native` is vLLM's OffloadingConnector with its default policy, `simple` its SimpleCPUOffloadConnector."""

_YIELD_SECONDS = 0.001
"""What vLLM's engine sleeps after a step that ran no model, if nothing else tells when to go on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeModel:
    """How long things take on the GPU that is not there.

    A step takes ``step_seconds`` + tokens computed / ``tokens_per_second``; a block takes ``block_bytes`` /
    ``link_bytes_per_second`` in each direction, one copy after the other. A token with ``double_at`` tokens
    before it takes twice as long as the first one of a prompt, and so on in proportion.
    """

    step_seconds: float = 0.010
    tokens_per_second: float = 20_000.0
    block_bytes: float = 2 << 20
    link_bytes_per_second: float = 25e9
    double_at: float = math.inf

    def seconds(self, output: SchedulerOutput) -> float:
        """What a step takes, as it was scheduled. O(requests)."""
        num_tokens = output.total_num_scheduled_tokens
        if self.double_at < math.inf:
            cached = output.scheduled_cached_reqs
            begun = [(new.req_id, new.num_computed_tokens) for new in output.scheduled_new_reqs]
            begun += zip(cached.req_ids, cached.num_computed_tokens, strict=True)
            for req_id, before in begun:
                own = output.num_scheduled_tokens[req_id]
                num_tokens += own * (before + own / 2) / self.double_at
        return self.step_seconds + num_tokens / self.tokens_per_second


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaySettings:
    """Sizes of the engine, in blocks of ``block_size`` tokens, tokens and requests.

    `timer` gives the nanoseconds of this machine that scheduler time is measured in. They are elapsed ones,
    or with `time.thread_time_ns` those that the scheduler's thread had a processor. ``watch``: measure the
    connector's calls as well, which makes a step longer by some microseconds. ``eviction_policy`` and
    ``store_decode_blocks`` are those of our connector, as are ``restore`` and ``store``. ``groups`` and
    ``retention`` are as in ``VirtualSettings``; hashes are of blocks of ``hash_tokens``. Without
    ``inner_checkpoints`` ours stores checkpoints where prompts end and part, and nowhere else. ``places`` are
    below our pool.
    The engine and its scheduler go by ``clock``; None: the engine by one of its own, the scheduler by that
    of this machine. ``overlapped``: a step is scheduled while the one before it runs, as with vLLM's async
    scheduling.
    """

    connector: str
    gpu_blocks: int
    cpu_blocks: int
    block_size: int = 16
    max_num_seqs: int = 256
    chunk: int = 8192
    max_model_len: int = 131_072
    timer: Callable[[], int] = time.perf_counter_ns
    watch: bool = True
    time: TimeModel = TimeModel()
    eviction_policy: str = DEFAULT_POLICY
    store_decode_blocks: bool | str = AUTO
    groups: tuple[Group, ...] = ()
    retention: int | None = 0
    inner_checkpoints: bool = True
    places: tuple[Place, ...] = ()
    restore: str = "always"
    store: str = "eager"
    clock: VirtualClock | None = None
    overlapped: bool = False


@dataclass(frozen=True, slots=True)
class Step:
    """What a step took. Scheduler time is of this machine, in nanoseconds; ``seconds`` are virtual.

    Attributes:
        output: what ran.
        schedule_ns: in ``Scheduler.schedule``, connector included; of what was scheduled meanwhile.
        update_ns: in ``Scheduler.update_from_output``, connector included.
        connector_ns: of both, in the connector's scheduler side, by phase.
        seconds: virtual time that passed.
        answers: what each request that generated a token in this step got.
    """

    output: SchedulerOutput
    schedule_ns: int
    update_ns: int
    connector_ns: dict[str, int]
    seconds: float
    answers: list[EngineCoreOutput]


class ReplayEngine:
    """One request queue, one scheduler, one rank. The caller decides when requests arrive.

    As in vLLM's engine, garbage is collected while it runs, but not what exists when it starts.
    """

    def __init__(self, settings: ReplaySettings) -> None:
        self.settings = settings
        self.clock = settings.clock or VirtualClock()
        virtual = _virtual(settings)
        vllm_config = make_vllm_config(virtual, _simple(virtual) if settings.connector == "simple" else None)
        make_hash(vllm_config)
        pace = Pace(settings.time.link_bytes_per_second)
        self.hash_tokens = tell_sizes(make_kv_cache_config(virtual), vllm_config).hashes
        self._link = Link(self.clock, lambda: pace)
        scale = settings.time.block_bytes / virtual.slot_bytes
        self._copier: Any = PacedCopier(self._link, scale=scale)
        self._worker: Any = None
        workers = {}
        if settings.connector != "none":
            workers[0, 0] = self._worker = self._make_worker(virtual, vllm_config)
        now = time.monotonic if settings.clock is None else lambda: self.clock.now
        self.scheduler = make_scheduler(virtual, vllm_config, now, workers)
        self.connector: Any = self.scheduler.connector
        if settings.connector == "offload" and not settings.inner_checkpoints:
            self.connector._scheduler.stores.checkpoints._is_worth_a_bag = lambda *_: False
        self._scheduled: deque[tuple[SchedulerOutput, dict[str, list[int]]]] = deque()  # and what it samples
        self._stopwatch = Stopwatch(settings.timer)
        if settings.watch and self.connector is not None:
            self._stopwatch.watch(self.connector, PHASES)
        freeze_gc_heap()

    def add(
        self, req_id: str, prompt_hashes: list[bytes], num_prompt: int, num_output: int, arrival: float = 0.0
    ) -> Request:
        """Send a request.

        Args:
            req_id: its name, unique.
            prompt_hashes: prefix hashes of its prompt, 32 bytes for each ``hash_tokens``.
            num_prompt: tokens of the prompt.
            num_output: tokens it will generate.
            arrival: in virtual seconds.
        """
        request = Request(
            request_id=req_id,
            prompt_token_ids=[0] * num_prompt,
            sampling_params=SamplingParams(max_tokens=num_output, ignore_eos=True),
            pooling_params=None,
            arrival_time=arrival,
            block_hasher=_Hashes(req_id, prompt_hashes, self.hash_tokens),
        )
        self.scheduler.add_request(request)
        return request

    def step(self, next_arrival: float | None = None) -> Step:
        """Schedule, let virtual time pass, update.

        Steps that overlap are scheduled until two are there, as vLLM's engine does; then the first one runs.

        A step without tokens waits for the next end of a copy, but not past ``next_arrival`` (virtual
        seconds; None: nobody is expected). With neither in sight it takes a millisecond.
        """
        timer = self.settings.timer
        most = 2 if self.settings.overlapped else 1
        began = timer()
        while len(self._scheduled) < most and (self.scheduler.has_requests() or not self._scheduled):
            output = self.scheduler.schedule()
            self._scheduled.append((output, self._sample(output)))
        scheduled = timer()
        before = self.clock.now
        output, sampled = self._scheduled.popleft()
        result = self._execute(output, sampled, next_arrival)
        seconds = self.clock.now - before
        ready = timer()
        updates = self.scheduler.update_from_output(output, result)
        updated = timer()
        answers = [answer for update in updates.values() for answer in update.outputs]
        return Step(output, scheduled - began, updated - ready, self._stopwatch.take(), seconds, answers)

    def is_idle(self) -> bool:
        """Whether nothing is left to do until the next request arrives."""
        return not (self._scheduled or self.scheduler.has_requests())

    def watch(self, owner: Any, labels: dict[str, str]) -> None:
        """Measure these methods of an object, too: ``Step.connector_ns`` has their labels from now on."""
        self._stopwatch.watch(owner, labels)

    def drop_worker(self) -> None:
        """Let go of the worker side and its pool; there are no steps after."""
        self._worker.shutdown()
        self._worker = self._copier = None

    def close(self) -> None:
        """Release threads and memory."""
        if self._worker is not None:
            self._worker.shutdown()
        self.scheduler.shutdown()
        gc.unfreeze()

    def _make_worker(self, virtual: VirtualSettings, vllm_config: VllmConfig) -> Any:
        kv_cache_config = make_kv_cache_config(virtual)
        tell_sizes(kv_cache_config, vllm_config)
        worker = make_worker(
            vllm_config,
            kv_cache_config,
            self.settings.places,
            make_copier=lambda *_: self._copier,
            clock=lambda: self.clock.now,
            shares_cores=False,
        )
        if self.settings.connector == "simple":
            handler = VirtualSimpleWorker(worker.worker_handler, self._link, self.settings.time.block_bytes)
            worker.worker_handler = self._copier = handler
        elif virtual.connector == "native":
            use_copier(worker, self._copier)
        make_cache(virtual, kv_cache_config, worker)
        return worker

    def _execute(
        self, output: SchedulerOutput, sampled: dict[str, list[int]], next_arrival: float | None
    ) -> ModelRunnerOutput:
        worker, model = self._worker, self.settings.time
        if worker is not None:
            worker.handle_preemptions(output.kv_connector_metadata)
            worker.bind_connector_metadata(output.kv_connector_metadata)
            worker.start_load_kv(None)
        num_tokens = output.total_num_scheduled_tokens
        if num_tokens:
            self.clock.now += model.seconds(output)
        elif not any(behind.total_num_scheduled_tokens for behind, _ in self._scheduled):
            events = [event for event in (self._copier.next_end, next_arrival) if event is not None]
            if output.preempted_req_ids or not events:  # a preempted request may go on at once
                events.append(self.clock.now + _YIELD_SECONDS)
            self.clock.wait_until(min(events))
        transfers: KVConnectorOutput | None = None
        if worker is not None:
            transfers = end_step(worker, output.finished_req_ids)
        return ModelRunnerOutput(
            req_ids=list(sampled),
            req_id_to_index={req_id: index for index, req_id in enumerate(sampled)},
            sampled_token_ids=list(sampled.values()),
            kv_connector_output=transfers,
        )

    def _sample(self, output: SchedulerOutput) -> dict[str, list[int]]:
        """A token for every request whose known tokens are all computed by what was just scheduled."""
        requests = self.scheduler.requests
        return {
            req_id: [] if requests[req_id].is_prefill_chunk else [0] for req_id in output.num_scheduled_tokens
        }


class _Hashes:
    """Gives a request hashes that are known beforehand; blocks it generates get hashes of their own."""

    def __init__(self, req_id: str, prompt_hashes: Sequence[bytes], block_size: int) -> None:
        self._req_id = req_id
        self._prompt_hashes = prompt_hashes
        self._num_prompt = len(prompt_hashes)
        self._block_size = block_size

    def __call__(self, request: Request) -> list[bytes]:
        known, full = len(request.block_hashes), request.num_tokens // self._block_size
        if known == full:
            return []
        prompt = self._prompt_hashes[known:full]
        if full >= self._num_prompt:
            self._prompt_hashes = ()  # the request has them all; no need to keep them twice
        generated = range(max(known, self._num_prompt), full)
        return [*prompt, *(own_hash(self._req_id, position) for position in generated)]


def own_hash(req_id: str, position: int) -> bytes:
    """The hash, 32 bytes, of a block that no other request has."""
    return hashlib.sha256(f"{req_id}/{position}".encode()).digest()


def _virtual(settings: ReplaySettings) -> VirtualSettings:
    """The virtual engine that this one is like, but for its clock and its copies."""
    if settings.connector not in CONNECTORS:
        raise ValueError(f"connector={settings.connector!r}: must be one of {', '.join(CONNECTORS)}")
    kind, _, policy = settings.connector.partition("-")
    return VirtualSettings(
        connector="none" if kind == "simple" else kind,
        gpu_blocks=settings.gpu_blocks,
        cpu_slots=settings.cpu_blocks,
        block_size=settings.block_size,
        groups=settings.groups,
        retention=settings.retention,
        num_layers=1,
        max_num_seqs=settings.max_num_seqs,
        chunk=settings.chunk,
        max_model_len=settings.max_model_len,
        store_decode_blocks=settings.store_decode_blocks,
        verify_loads="never",
        eviction_policy=settings.eviction_policy,
        native_options={"eviction_policy": policy or "lru", "offload_prompt_only": True},
        log_stats=True,
        places=settings.places,
        restore=settings.restore,
        store=settings.store,
        overlapped=settings.overlapped,
    )


def _simple(virtual: VirtualSettings) -> dict[str, Any]:
    extra = {"cpu_bytes_to_use": virtual.cpu_slots * virtual.slot_bytes}
    return transfer_config(extra, "SimpleCPUOffloadConnector")
