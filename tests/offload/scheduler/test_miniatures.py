"""Small pools that are fed a sample say what pools of other sizes would find."""

import random
import time
from collections.abc import Sequence
from itertools import count
from typing import Any

import pytest

from allocator import CpuOffloadingBlockAllocator, hash_chain, serve
from evictor import make_policy
from offload.scheduler.miniatures import MOST_POSITIONS, SIZES, Miniatures
from tests.offload.scheduler.serving import Serving, Sizes

NO_TIME = 0.0


def requests(seed: int, num_requests: int, num_documents: int, num_blocks: int) -> list[list[bytes]]:
    """Chains that all begin alike, of documents of which some are asked for often, each with its question."""
    rng, fresh = random.Random(seed), count(10**6)
    chains = []
    for _ in range(num_requests):
        document = min(int(rng.expovariate(5 / num_documents)), num_documents - 1)
        body = [document * num_blocks + position for position in range(rng.randrange(1, num_blocks))]
        chains.append(hash_chain([0, 1, *body, next(fresh), next(fresh)], 1))
    return chains


def truth(chains: Sequence[list[bytes]], num_slots: int, policy: str) -> float:
    """Hit rate of the connector's own allocator."""
    allocator = CpuOffloadingBlockAllocator(num_slots, policy=make_policy(policy, num_slots))
    return sum(serve(allocator, chain).depth for chain in chains) / sum(map(len, chains))


def estimates(chains: Sequence[list[bytes]], miniatures: Miniatures) -> list[float]:
    for chain in chains:
        miniatures.asked(chain)
        miniatures.step()
    num_asked, missed = miniatures.take()
    assert num_asked == sum(map(len, chains))
    assert miniatures.hit_rates() == [pytest.approx(1 - each / num_asked) for each in missed]
    miniatures.check_invariants()
    return miniatures.hit_rates()


@pytest.mark.parametrize("policy", ["hazard", "lru", "s3fifo"])
def test_where_all_is_in_the_sample_they_are_right(policy: str) -> None:
    chains = requests(1, 400, 20, 30)
    told = estimates(chains, Miniatures(100, policy, lambda: NO_TIME, lambda: NO_TIME))
    assert told == [pytest.approx(truth(chains, int(100 * size), policy)) for size in SIZES]
    assert told == sorted(told)
    assert told[0] < told[-1]


@pytest.mark.parametrize("policy", ["hazard", "lru"])
@pytest.mark.parametrize("seed", range(2))
def test_a_sample_of_an_eighth_tells_it_within_five_points(seed: int, policy: str) -> None:
    """Also though all begin with the same two blocks, which are a thirtieth of what is asked for."""
    chains = requests(seed, 1000, 150, 120)
    miniatures = Miniatures(4096, policy, lambda: NO_TIME, lambda: NO_TIME)
    told = estimates(chains, miniatures)
    assert miniatures.rate == MOST_POSITIONS / 4096
    for size, rate in zip(SIZES, told, strict=True):
        assert abs(rate - truth(chains, int(4096 * size), policy)) < 0.05, size


def test_a_sample_is_of_positions_so_that_whoever_shares_a_prefix_shares_that_of_its_sample() -> None:
    miniatures = Miniatures(5000, "lru", lambda: NO_TIME, lambda: NO_TIME)
    chain = hash_chain(list(range(4000)), 1)
    whole = miniatures.sample(chain)
    assert 300 < len(whole) < 520  # a tenth
    for stop in (0, 1, 17, 2000, 4000):
        part = miniatures.sample(chain[:stop])
        assert part == whole[: len(part)]
        assert part + miniatures.sample(chain[stop:]) == whole


def test_answers_are_found_by_what_follows() -> None:
    miniatures = Miniatures(64, "lru", lambda: NO_TIME, lambda: NO_TIME)
    chain = hash_chain(list(range(8)), 1)
    miniatures.finished(miniatures.asked(chain[:3]), chain[3:], None)
    miniatures.asked(chain)
    miniatures.step()
    assert miniatures.take() == (11, [3.0] * 4)
    miniatures.reset()
    miniatures.asked(chain)
    miniatures.step()
    assert miniatures.take() == (8, [8.0] * 4)


def test_what_was_asked_for_long_ago_counts_less() -> None:
    now = [0.0]
    miniatures = Miniatures(64, "lru", lambda: now[0], lambda: NO_TIME)
    assert miniatures.hit_rates() == [0.0] * 4
    chain = hash_chain(list(range(8)), 1)
    miniatures.asked(chain)
    miniatures.step()
    miniatures.take()
    assert miniatures.hit_rates() == [0.0] * 4
    now[0] = 600.0  # a half-life
    miniatures.asked(chain)
    miniatures.step()
    miniatures.take()
    assert miniatures.hit_rates() == [pytest.approx(8 / 12)] * 4
    miniatures.resize(128)
    assert miniatures.hit_rates() == [0.0] * 4, "of another size nothing is known"


def test_what_they_cost_is_bounded_by_their_own_clock() -> None:
    """Each call takes a second here, of a thread that works for a thousand between two requests."""
    worked = [0.0]

    def timer() -> float:
        worked[0] += 0.5  # looked at when something begins, and when it has ended
        return worked[0]

    miniatures = Miniatures(64, "lru", lambda: NO_TIME, timer)
    for number in range(3000):
        miniatures.asked(hash_chain([number], 1))
        miniatures.step()
        worked[0] += 100.0
        assert len(miniatures._waiting) <= 256
    assert miniatures.rate < 1, "nothing was left out"
    assert 3000 * 0.5 < miniatures.seconds < 0.02 * worked[0], "samples count, too"
    miniatures.check_invariants()


def test_the_side_tells_them_and_forgets_who_is_over() -> None:
    serving = Serving(Sizes())
    for _ in range(2):
        serving.send(range(16), [7])
        for _ in range(8):
            serving.step()
    assert serving.metrics["asked_tokens"] == 32
    assert serving.side.metrics.gauges["hit_rate_at_size:4"] == 0.5
    assert "requests in other sizes" not in serving.side.left_over()
    serving.side.check_invariants()


def test_what_was_not_served_is_neither_asked_for_nor_missed() -> None:
    """Otherwise chains that are left out would look as if all pools had had them."""
    worked = [0.0]

    def timer() -> float:
        worked[0] += 0.01
        return worked[0]

    miniatures = Miniatures(64, "lru", lambda: NO_TIME, timer)
    for number in range(2000):
        miniatures.asked(hash_chain([number, number], 1))
        miniatures.step()
    assert miniatures.rate < 1, "nothing was left out"
    miniatures.take()
    assert max(miniatures.hit_rates()) < 0.5
    miniatures.check_invariants()


def test_the_kernel_is_not_asked_before_there_can_be_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """To ask it is a system call, in every step of an engine whose chains wait."""
    worked, passed, num_asked = [0.0], [0.0], [0]

    def thread_time() -> float:
        num_asked[0] += 1
        return worked[0]

    monkeypatch.setattr(time, "thread_time", thread_time)
    monkeypatch.setattr(time, "perf_counter", lambda: passed[0])
    miniatures = Miniatures(64, "lru", lambda: NO_TIME)
    serve_one = miniatures._serve

    def served(each: Any) -> None:
        serve_one(each)
        worked[0] += 0.01  # more than may be spent at once

    miniatures._serve = served  # type: ignore[method-assign]
    for number in range(3):
        miniatures.asked(hash_chain([number], 1))
    miniatures.step()
    assert len(miniatures._waiting) == 2
    num_asked[0] = 0
    for _ in range(100):
        passed[0] += 0.02
        miniatures.step()
    assert num_asked[0] == 1 and len(miniatures._waiting) == 2
    worked[0] = passed[0] = passed[0] + 10
    miniatures.step()
    assert len(miniatures._waiting) == 1
    miniatures.check_invariants()


def test_a_step_serves_no_more_than_its_time() -> None:
    worked = [0.0]
    miniatures = Miniatures(64, "lru", lambda: NO_TIME, lambda: worked[0])
    serve_one, num_served = miniatures._serve, [0]

    def served(sampled: Any) -> None:
        serve_one(sampled)
        num_served[0] += 1
        worked[0] += 0.0003

    miniatures._serve = served  # type: ignore[method-assign]
    worked[0] = 3600.0  # nothing was asked for in an hour
    for number in range(200):
        miniatures.asked(hash_chain([number], 1))
    miniatures.step()
    assert num_served == [4]
