"""Hypothesis drives the virtual engine: any order of arrivals, aborts, resets, held copies and faults.

The random workload goes far; this one goes anywhere, and shrinks what it finds to a few calls.
"""

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from vllm.v1.request import Request

from offload.messages import LOAD, STORE
from offload.testing.copiers.faulty import Fault
from offload.testing.virtual import VirtualEngine
from tests.strategies import thorough
from tests.virtual.driver import (
    come_to_rest,
    make_engine,
    tokens,
    warm,
)

ways = st.sampled_from([LOAD, STORE])


class VirtualMachine(RuleBasedStateMachine):
    engine: VirtualEngine | None = None

    @initialize(
        num_ranks=st.integers(1, 2),
        overlapped=st.booleans(),
        v2_runner=st.booleans(),
        policy=st.sampled_from(["fcfs", "priority"]),
        cpu_slots=st.sampled_from([3, 40]),
        first_part=st.sampled_from([1, 16]),
        seals_of_blocks=st.booleans(),
    )
    def start(
        self,
        num_ranks: int,
        overlapped: bool,
        v2_runner: bool,
        policy: str,
        cpu_slots: int,
        first_part: int,
        seals_of_blocks: bool,
    ) -> None:
        self.engine = make_engine(
            num_ranks=num_ranks,
            overlapped=overlapped,
            v2_runner=v2_runner,
            policy=policy,
            cpu_slots=cpu_slots,
            first_part=first_part,
            seals_of_blocks=seals_of_blocks,
            gpu_blocks=12,
            chunk=12,
            max_num_seqs=3,
        )
        self.requests: list[Request] = []

    @rule(
        length=st.integers(1, 30),
        first=st.sampled_from([0, 0, 1]),
        max_tokens=st.integers(1, 12),
        priority=st.integers(0, 1),
        copies=st.integers(1, 2),
    )
    def arrive(self, length: int, first: int, max_tokens: int, priority: int, copies: int) -> None:
        assert self.engine is not None
        for _ in range(copies):
            self.requests.append(self.engine.add(tokens(length, first), max_tokens, priority=priority))

    @rule(count=st.integers(1, 8))
    def step(self, count: int) -> None:
        assert self.engine is not None
        for _ in range(count):
            self.engine.step()

    @precondition(lambda self: self.engine is not None and self.requests)
    @rule(index=st.integers(0))
    def abort(self, index: int) -> None:
        assert self.engine is not None
        self.engine.abort(self.requests[index % len(self.requests)].request_id)

    @rule(connector=st.booleans())
    def reset(self, connector: bool) -> None:
        assert self.engine is not None
        self.engine.reset(connector=connector, running=self.engine.can_reset_running())

    @rule(way=ways, rank=st.integers(0, 1))
    def hold(self, way: object, rank: int) -> None:
        assert self.engine is not None
        self.engine.copiers[rank % len(self.engine.copiers)].held.add(way)  # type: ignore[arg-type]

    @rule(rank=st.integers(0, 1))
    def release(self, rank: int) -> None:
        assert self.engine is not None
        self.engine.copiers[rank % len(self.engine.copiers)].held.clear()

    @rule(way=ways, rank=st.integers(0, 1), fault=st.sampled_from(list(Fault)))
    def fail_next(self, way: object, rank: int, fault: Fault) -> None:
        assert self.engine is not None
        if fault is Fault.WRONG_BYTES and not self.engine.settings.seals_of_blocks:
            return  # nobody could tell
        self.engine.copiers[rank % len(self.engine.copiers)].force(way, fault)  # type: ignore[arg-type]

    @rule()
    def rot(self) -> None:
        assert self.engine is not None
        self.engine.rot()

    def teardown(self) -> None:
        if self.engine is None:
            return
        try:
            come_to_rest(self.engine)
            assert all(request.is_finished() for request in self.requests)
        finally:
            self.engine.close()


TestVirtualMachine = VirtualMachine.TestCase
TestVirtualMachine.settings = thorough(60, steps=40)


def test_one_load_after_the_other_may_be_stuck() -> None:
    """Each request needs more blocks than a stuck load leaves, so each waits until it has ended."""
    engine = make_engine(gpu_blocks=12, cpu_slots=40, first_part=16, chunk=12, max_num_seqs=3)
    prompts = tokens(25, 0), tokens(25, 1)
    for prompt in prompts:
        warm(engine, prompt)
    for prompt in prompts:
        engine.copiers[0].force(LOAD, Fault.STUCK)
        engine.add(prompt, 9)
    come_to_rest(engine)
    assert engine.counts["load stuck"] == 2
    engine.close()
