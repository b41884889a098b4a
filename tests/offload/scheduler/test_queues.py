"""How busy a link and a GPU are."""

import pytest

from offload.scheduler.costs import LinkCost, PrefillCost
from offload.scheduler.queues import GpuQueue, LinkQueue, Longest
from offload.testing.memory_engine import MemoryRequest


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


# The link


@pytest.fixture
def link(clock: Clock) -> LinkQueue:
    cost = LinkCost()
    cost.add(1000, 1.0)
    return LinkQueue(cost, clock)


def test_a_link_is_busy_until_time_has_passed(link: LinkQueue, clock: Clock) -> None:
    assert link.seconds == 0
    link.begin(2000)
    link.begin(3000)
    assert link.seconds == pytest.approx(5.0)
    clock.now += 4
    assert link.seconds == pytest.approx(1.0)
    clock.now += 4
    assert link.seconds == 0
    link.check_invariants(5000)


def test_where_nobody_asks_nothing_is_estimated(clock: Clock) -> None:
    link = LinkQueue(None, clock)
    link.begin(2000)
    link.begin(3000)
    assert link.seconds == 0
    link.end(2000)
    link.check_invariants(3000)


def test_what_ends_early_leaves_the_rest(link: LinkQueue) -> None:
    link.begin(2000)
    link.begin(3000)
    link.end(2000)
    assert link.seconds == pytest.approx(3.0)
    link.end(3000)
    assert link.seconds == 0
    link.check_invariants(0)


def test_what_ends_late_does_not_begin_again(link: LinkQueue, clock: Clock) -> None:
    link.begin(2000)
    link.begin(3000)
    clock.now += 4
    link.end(2000)
    assert link.seconds == pytest.approx(1.0)
    link.check_invariants(3000)


def test_a_link_of_which_nothing_is_known_is_free(clock: Clock) -> None:
    link = LinkQueue(LinkCost(), clock)
    link.begin(5000)
    assert link.seconds == 0
    link.end(5000)
    link.check_invariants(0)


# How long requests took


def test_the_longest_of_late_counts(clock: Clock) -> None:
    longest = Longest(clock)
    assert longest.seconds == 0
    longest.note(3.0)
    longest.note(2.0)
    clock.now += 29
    assert longest.seconds == 3.0
    clock.now += 2
    longest.note(1.0)
    assert longest.seconds == 3.0
    clock.now += 31
    assert longest.seconds == 1.0
    clock.now += 61
    assert longest.seconds == 0


# The GPU


@pytest.fixture
def gpu(clock: Clock) -> GpuQueue:
    prefill = PrefillCost(clock, 1000)
    step = prefill.begin(1000, lambda: 0.0)
    clock.now += 1.0
    prefill.end(step)
    return GpuQueue(prefill, clock)


def request_of(num_tokens: int, name: str) -> MemoryRequest:
    return MemoryRequest(name, range(num_tokens), [7] * 9, 4)


def test_who_waits_is_taken_to_compute_as_much_as_others(gpu: GpuQueue) -> None:
    for number in range(100):
        done = request_of(100, f"done {number}")
        gpu.arrived(done)
        gpu.admitted(done, 75)
        gpu.finish(done.request_id)
    gpu.arrived(request_of(100, "a"))
    gpu.arrived(request_of(300, "b"))
    gpu.check_invariants()
    assert gpu.backlog("nobody") == pytest.approx(0.4 * 0.25, rel=0.05)
    assert gpu.backlog("a") == pytest.approx(0.3 * 0.25, rel=0.05)
    assert gpu.backlog("b") == pytest.approx(0.1 * 0.25, rel=0.05)


def test_who_is_held_is_in_nobodys_backlog_until_the_step_has_ended(gpu: GpuQueue) -> None:
    gpu.arrived(request_of(100, "a"))
    gpu.arrived(request_of(300, "b"))
    gpu.arrived(request_of(200, "c"))
    for _ in range(2):
        gpu.held("a")
        gpu.held("nobody")
        assert (gpu.num_waiting, gpu.num_held) == (3, 1)
        gpu.check_invariants()
        assert gpu.backlog("nobody") == pytest.approx(0.5)
        assert gpu.backlog("a") == pytest.approx(0.5)
        assert gpu.backlog("b") == pytest.approx(0.2)
    gpu.end_step()
    gpu.check_invariants()
    assert gpu.num_held == 0 and gpu.backlog("b") == pytest.approx(0.3)
    gpu.held("a")
    gpu.finish("a")
    gpu.check_invariants()
    assert gpu.num_held == 0 and gpu.backlog("b") == pytest.approx(0.2)


def test_at_first_requests_compute_all(gpu: GpuQueue) -> None:
    gpu.arrived(request_of(100, "a"))
    assert gpu.backlog("b") == pytest.approx(0.1)


def test_who_is_computed_has_that_left(gpu: GpuQueue) -> None:
    request = request_of(400, "a")
    gpu.arrived(request)
    gpu.admitted(request, 100)
    assert gpu.backlog("b") == 0, "its KV is on its way"
    request.num_computed_tokens = 100
    gpu.goes_on(request)
    assert gpu.backlog("b") == pytest.approx(0.3)
    request.num_computed_tokens = 300
    assert gpu.backlog("b") == pytest.approx(0.1)
    gpu.check_invariants()


def test_who_answers_keeps_nobody_waiting(gpu: GpuQueue) -> None:
    request = request_of(400, "a")
    gpu.admitted(request, 0)
    gpu.goes_on(request)
    request.num_computed_tokens = 400
    request.append()
    assert gpu.backlog("b") == 0
    assert not gpu.left_over()


def test_who_has_ended_is_not_known(gpu: GpuQueue) -> None:
    waits, computes = request_of(100, "a"), request_of(100, "b")
    gpu.arrived(waits)
    gpu.arrived(computes)
    gpu.admitted(computes, 0)
    gpu.goes_on(computes)
    assert sorted(gpu.left_over()) == ["a", "b"]
    gpu.finish("a")
    gpu.finish("b")
    gpu.check_invariants()
    assert gpu.backlog("c") == 0 and not gpu.left_over()


def test_who_comes_again_waits_once(gpu: GpuQueue) -> None:
    """A session whose next prompt has come."""
    request = request_of(100, "a")
    gpu.arrived(request)
    gpu.admitted(request, 0)
    gpu.goes_on(request)
    gpu.arrived(request)
    gpu.check_invariants()
    assert gpu.backlog("b") == pytest.approx(0.1)


def test_who_waits_knows_for_how_long(gpu: GpuQueue, clock: Clock) -> None:
    request = request_of(100, "a")
    gpu.arrived(request)
    clock.now += 3
    assert gpu.waited("a") == pytest.approx(3.0)
    gpu.admitted(request, 0)
    assert gpu.waited("a") == 0
