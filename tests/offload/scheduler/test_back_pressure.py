"""When restores wait for those under way, and for how long."""

import pytest

from offload.restore_config import RestoreWhen
from offload.scheduler import choices as module
from offload.scheduler.back_pressure import BackPressure
from offload.scheduler.choice import Choice, Prospect
from offload.scheduler.costs import LinkCost, PrefillCost
from tests.offload.scheduler.test_choices import BLOCK_BYTES, SIZE, STOP, Desk

THIRD = 33
"""Of 100 GPU blocks, rounded down. A step of 1,000 tokens takes a second."""
FIVE_STEPS = 5.0


class Link(Desk):
    """Loads of 1,000 tokens, each of which takes half a second; other requests compute."""

    def __init__(self, when: RestoreWhen = RestoreWhen.AUTO) -> None:
        super().__init__(when)
        self.measure(0.0005)
        self.pressure = BackPressure(self.choices._common, self.choices, 1000)

    def load(self, seconds: float) -> None:
        self.choices.queue.begin(round(seconds / 0.0005) * BLOCK_BYTES // SIZE)

    def asks(self, num_local: int = 0, request_id: str = "") -> bool:
        """Whether it must wait; it has so many tokens on the GPU."""
        return self.pressure.must_wait(request_id, num_local, STOP)

    def must_wait(self) -> bool:
        """Whether one must that asks alone in a step."""
        told = self.asks()
        self.pressure.end_step()
        return told


@pytest.fixture
def link() -> Link:
    """It is busy, and a third of the GPU's blocks wait for it."""
    link = Link()
    link.load(FIVE_STEPS + 0.1)
    link.pressure.began(THIRD + 1)
    return link


def test_who_could_be_restored_waits_for_a_busy_link(link: Link) -> None:
    assert link.must_wait()


def test_so_much_is_on_the_link_in_any_case(link: Link) -> None:
    link.now += 0.2
    assert not link.must_wait()


def test_so_many_blocks_are_filled_in_any_case(link: Link) -> None:
    link.pressure.ended(1)
    assert not link.must_wait()
    link.pressure.began(1)
    assert link.must_wait()
    link.pressure.check_invariants(THIRD + 1)
    with pytest.raises(AssertionError, match="34 counted"):
        link.pressure.check_invariants(THIRD)


def test_while_others_are_computed_more_is_on_the_link(link: Link) -> None:
    other = link.come()
    link.admit(other, 0)
    assert not link.must_wait(), "it takes a second"
    link.load(1.0)
    assert link.must_wait()
    link.choices.finish(other.request_id)
    link.now += 0.9
    assert link.must_wait()


def test_in_a_step_there_is_one_limit_for_all(link: Link) -> None:
    """Who is admitted behind the first that asks makes it no longer for the next."""
    assert link.asks()
    link.admit(link.come(), 0)
    assert link.asks()
    link.pressure.end_step()
    assert not link.asks()


def test_once_one_waits_all_who_ask_later_in_the_step_do(link: Link) -> None:
    """The clock goes on while vLLM asks."""
    assert link.asks()
    link.now += 1.0
    assert link.asks()
    link.pressure.end_step()
    assert not link.asks()


def test_as_soon_as_the_link_is_busy_the_next_waits() -> None:
    link = Link()
    link.pressure.began(THIRD + 1)
    assert not link.asks()
    link.load(FIVE_STEPS + 0.1)
    assert link.asks()


@pytest.mark.parametrize(("num_local", "most"), [(0, 102), (1000, 3), (500, 7)])
def test_where_looking_up_would_take_too_long_nobody_waits(link: Link, num_local: int, most: int) -> None:
    """The GPU has so many blocks of each in the mean, and ``most`` may wait."""
    requests = [link.come() for _ in range(most)]
    link.asks((num_local - num_local // 2) * SIZE)
    link.asks((num_local + num_local // 2) * SIZE)
    link.pressure.end_step()
    assert link.asks(num_local * SIZE)
    link.pressure.end_step()
    link.come()
    for _ in range(2):
        assert not link.asks(num_local * SIZE)
        link.pressure.end_step()
    link.choices.finish(requests[0].request_id)
    assert link.asks(num_local * SIZE)


def test_where_the_first_have_little_on_the_gpu_those_behind_are_remembered(link: Link) -> None:
    """Where nobody waits, vLLM asks only the first."""
    for _ in range(60):
        link.come()
    asked = []
    for _ in range(20):
        asked.append(link.asks(0) and link.asks(0))
        if asked[-1]:
            assert all(link.asks(1000 * SIZE) for _ in range(58))
        link.pressure.end_step()
    assert asked == [True] + [False] * 19


def test_those_that_wait_are_under_way_for_who_asks_later_in_the_step(link: Link) -> None:
    """To load one of them takes half a second, and to compute it a second."""
    first, second, third = (link.come() for _ in range(3))
    chosen: list[Prospect] = []
    choose = module.choose

    def noted(prefill: PrefillCost, cost: LinkCost, prospect: Prospect) -> Choice:
        chosen.append(prospect)
        return choose(prefill, cost, prospect)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "choose", noted)
        for request in (first, second, third):
            link.ask(request)
            link.asks(request_id=request.request_id)
            link.choices.check_invariants()
        link.pressure.end_step()
        link.ask(third)
    queue = FIVE_STEPS + 0.1
    assert [each.queue for each in chosen] == pytest.approx([queue, queue + 0.5, queue + 1.0, queue], 1e-3)
    assert [each.backlog for each in chosen] == pytest.approx([2.0, 1.0, 0.0, 2.0], rel=1e-2)
    assert [each.num_restoring for each in chosen] == [0, 1, 2, 0]


@pytest.mark.parametrize("when", [RestoreWhen.ALWAYS, RestoreWhen.NEVER])
def test_where_the_configuration_decides_nobody_waits(when: RestoreWhen) -> None:
    link = Link(when)
    link.load(100.0)
    link.pressure.began(100)
    assert not link.must_wait()


def test_with_checkpoints_nobody_waits(link: Link, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link.choices._common.engine.groups, "has_bags", True)
    assert not link.must_wait()


def test_nobody_waits_where_few_blocks_are_filled() -> None:
    link = Link()
    link.load(100.0)
    assert not link.must_wait()
    link.pressure.began(THIRD)
    assert not link.must_wait()


def test_nobody_waits_for_a_link_of_which_nothing_is_known() -> None:
    desk = Desk()
    pressure = BackPressure(desk.choices._common, desk.choices, 1000)
    pressure.began(100)
    desk.choices.queue.begin(1 << 30)
    assert not pressure.must_wait("r", 0, STOP)
