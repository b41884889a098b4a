"""vLLM's own connector in the virtual engine, and copies with a bandwidth: what comparisons rest on."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from offload.messages import LOAD, STORE
from offload.testing.copiers.seeded import CopySchedule
from offload.testing.virtual import MODELS, VirtualEngine, VirtualSettings
from offload.testing.virtual.history import WrongBytesError
from tests.virtual.driver import (
    serve,
    step_until,
    table_of,
    tokens,
    warm,
    watch,
)

BLOCK_BYTES = VirtualSettings().slot_bytes


@pytest.mark.parametrize("block_outermost", [False, True])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_native_restores(
    engines: Callable[..., VirtualEngine], num_ranks: int, block_outermost: bool
) -> None:
    copies = CopySchedule(longest_delay=3)
    engine = engines(connector="native", num_ranks=num_ranks, block_outermost=block_outermost, copies=copies)
    warm(engine, tokens(40))
    assert all(copier.copied[STORE] == 10 * BLOCK_BYTES for copier in engine.copiers)
    computed = watch(engine)
    request = serve(engine, [*tokens(40), 1, 2, 3], 4)
    assert computed[request.request_id] == 3 + 3
    assert all(copier.copied[LOAD] == 10 * BLOCK_BYTES for copier in engine.copiers)
    engine.audit.check_drained()


@pytest.mark.parametrize("model", MODELS)
def test_native_restores_each_kind(engines: Callable[..., VirtualEngine], model: str) -> None:
    """Where vLLM keeps windows and states of all places."""
    engine = engines(connector="native", groups=MODELS[model], retention=None, gpu_blocks=120, cpu_slots=400)
    warm(engine, tokens(61))
    computed = watch(engine)
    request = serve(engine, [*tokens(61), 1, 2, 3], 4)
    last_block = 61 % engine.settings.block_tokens
    assert computed[request.request_id] == last_block + 3 + 3
    engine.audit.check_drained()


def test_native_is_not_taken_on_trust(engines: Callable[..., VirtualEngine]) -> None:
    """A block that comes back with one wrong bit is seen by the first who attends to it."""
    engine = engines(connector="native")
    warm(engine, tokens(40))
    request = engine.add([*tokens(40), 1], 2)
    step_until(engine, lambda: engine.copiers[0].copied[LOAD] > 0)
    engine.ranks[0].cells[0, table_of(engine, request)[5], 1, 0] ^= 1
    with pytest.raises(WrongBytesError, match=r"positions \[21\]"):
        engine.drain()


@pytest.mark.parametrize("connector", ["offload", "native", "none"])
def test_a_gpu_too_small_for_all(engines: Callable[..., VirtualEngine], connector: str) -> None:
    """Preemptions and evictions everywhere: all bytes are right, and all requests are served."""
    engine = engines(connector=connector, gpu_blocks=14, cpu_slots=30, chunk=16)
    for turn in range(3):
        requests = [engine.add(tokens(20 + index, first=index), 12) for index in range(5)]
        engine.drain(1000)
        assert all(request.num_output_tokens == 12 for request in requests), f"turn {turn}"
    assert engine.counts["preemptions"] > 0
    engine.audit.check_drained()


def test_no_connector_computes_everything(engines: Callable[..., VirtualEngine]) -> None:
    engine = engines(connector="none")
    warm(engine, tokens(40))
    computed = watch(engine)
    request = serve(engine, tokens(40))
    assert computed == {request.request_id: 40} and not engine.copiers[0].copied


@pytest.mark.parametrize("connector", ["offload", "native"])
@pytest.mark.parametrize(("blocks_per_step", "steps"), [(0, 1), (20, 1), (10, 2), (7, 3), (1, 20)])
def test_a_load_takes_its_steps(
    engines: Callable[..., VirtualEngine], connector: str, blocks_per_step: int, steps: int
) -> None:
    """20 blocks at so many per step."""
    copies = CopySchedule(bytes_per_poll=blocks_per_step * BLOCK_BYTES)
    engine = engines(connector=connector, chunk=100, copies=copies)
    warm(engine, tokens(80))
    began = engine.num_steps
    request = engine.add([*tokens(80), 1], 1)
    computed = watch(engine)
    step_until(engine, lambda: request.request_id in computed)
    assert engine.num_steps - began - 1 == steps


def test_loads_take_turns_and_stores_do_not_slow_them(engines: Callable[..., VirtualEngine]) -> None:
    """Two loads of 10 blocks at 4 per step end after 3 and 5 steps, whatever is stored meanwhile."""
    engine = engines(connector="native", gpu_blocks=80, copies=CopySchedule(bytes_per_poll=4 * BLOCK_BYTES))
    warm(engine, tokens(40, first=1))
    warm(engine, tokens(40, first=2))
    served = watch(engine)
    began = engine.num_steps
    first, second = (engine.add([*tokens(40, first=index), 7], 1).request_id for index in (1, 2))
    engine.add(tokens(30, first=3), 1)
    step_until(engine, lambda: first in served)
    assert engine.num_steps - began - 1 == 3
    step_until(engine, lambda: second in served)
    assert engine.num_steps - began - 1 == 5


def test_an_idle_link_saves_nothing_up(engines: Callable[..., VirtualEngine]) -> None:
    """Bandwidth that nobody used is gone, and a job that is waited for uses that of later steps."""
    engine = engines(copies=CopySchedule(bytes_per_poll=BLOCK_BYTES))
    copier = engine.copiers[0]
    for _ in range(5):
        copier.poll()
    assert copier._credit[LOAD] == copier._credit[STORE] == 0
    request = engine.add(tokens(12), 8)
    step_until(engine, lambda: bool(copier._tasks))
    copier.hurry({task.job_id for task in copier._tasks})
    assert not copier._tasks and copier._credit[STORE] < 0
    engine.drain()
    assert request.is_finished()


def test_what_no_engine_can_be() -> None:
    with pytest.raises(ValueError, match=r"connector='nativ': must be one of offload, native, none"):
        VirtualSettings(connector="nativ")
    native = VirtualSettings(connector="native")
    with pytest.raises(ValueError, match=r"fault_rate=0\.1: must be 0"):
        replace(native, copies=CopySchedule(fault_rate=0.1))


@pytest.mark.parametrize("connector", ["offload", "native"])
def test_blocks_on_the_gpu_are_not_loaded_again(
    engines: Callable[..., VirtualEngine], connector: str
) -> None:
    engine = engines(connector=connector)
    warm(engine, tokens(40))
    serve(engine, tokens(40))
    loaded = engine.copiers[0].copied[LOAD]
    serve(engine, [*tokens(40), 1])
    assert engine.copiers[0].copied[LOAD] == loaded
