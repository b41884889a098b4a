"""What the pool's policy is told of how answers end, by the scheduler's side over an engine in memory."""

import random
from collections.abc import Sequence
from heapq import heapify, heappop, heappush

import pytest

from allocator import CpuOffloadingBlockAllocator, hash_chain, serve
from evictor import make_policy
from evictor.kinds import ending_of
from offload.scheduler.engine import State
from offload.scheduler.hints import RequestHints
from offload.scheduler.miniatures import SIZES, Miniatures
from offload.testing.memory_engine import MemoryRequest
from tests.offload.scheduler.serving import Serving, Sizes

TOOL, TURN = [40, 50], [41, 50]
"""Last tokens of an answer."""


@pytest.fixture
def serving() -> Serving:
    return Serving(Sizes(num_blocks=40, policy="hazard"))


def ask(
    serving: Serving, first: int, answer: Sequence[int], hints: RequestHints | None = None
) -> MemoryRequest:
    """One request of four blocks; all comes to rest."""
    request = serving.send(range(first, first + 8), answer, hints)
    serving.drain()
    return request


def told_of(serving: Serving, request: MemoryRequest) -> set[int]:
    """What the policy knows of how the answer has ended, of all that the pool has of the request."""
    allocator = serving.side.allocator
    node, depth = allocator._tree.find(request.block_hashes, len(request.block_hashes))
    assert depth == (request.num_tokens - 1) // 2, "all that was computed is in the pool"
    return {ending_of(each.rank.kind) for each in allocator._tree.path(node)}


def test_answers_that_end_alike_are_of_one_class(serving: Serving) -> None:
    answers = [[1, 2, *TOOL], [3, *TOOL], [1, 2, *TURN], TURN]
    requests = [ask(serving, 100 * number, answer) for number, answer in enumerate(answers)]
    tool, same_tool, turn, same_turn = (told_of(serving, request) for request in requests)
    assert tool == same_tool and turn == same_turn and tool != turn
    assert len(tool) == len(turn) == 1 and not {0} & (tool | turn), "prompts and answers alike"


def test_one_that_runs_has_no_ending(serving: Serving) -> None:
    serving.send(range(8), [1] * 8)
    serving.step()
    serving.step()
    serving.check()
    assert {ending_of(node.rank.kind) for node in serving.side.allocator._tree.nodes()} == {0}
    assert list(serving.side._turns) == ["r0"]
    serving.drain()
    assert {ending_of(node.rank.kind) for node in serving.side.allocator._tree.nodes()} == {1}


def test_one_that_is_aborted_has_a_class_of_its_own(serving: Serving) -> None:
    """Whatever it has written: it did not end that."""
    whole = told_of(serving, ask(serving, 0, [1, *TOOL]))
    cut = []
    for first, answer in ((100, [1, *TOOL, 9]), (200, [1, *TURN, 9])):
        request = serving.send(range(first, first + 8), answer)
        while request.num_output_tokens < 3:
            serving.step()
        serving.abort(request)
        serving.drain()
        cut.append(told_of(serving, request))
    assert cut[0] == cut[1] != whole and len(cut[0]) == 1 and cut[0] != {0}


def test_one_that_is_aborted_before_it_wrote_anything_says_nothing(serving: Serving) -> None:
    waits = serving.send(range(100, 108), TOOL)
    runs = serving.send(range(8), TOOL)
    serving.step(tokens=4)
    assert waits.num_computed_tokens == 4 and not waits.num_output_tokens
    for request in (waits, runs):
        serving.abort(request)
    assert request.state is State.ABORTED
    serving.drain()
    assert not serving.side._turns._endings._counts
    assert {ending_of(node.rank.kind) for node in serving.side.allocator._tree.nodes()} <= {0}


def test_a_hint_is_part_of_how_it_ended(serving: Serving) -> None:
    """A client that gives its KV a time to live expects to come back. Which time it is does not matter."""
    hints = [None, RequestHints(ttl_seconds=30), RequestHints(ttl_seconds=40), RequestHints(pin_seconds=5)]
    plain, mortal, also, pinned = (
        told_of(serving, ask(serving, 100 * number, TOOL, hint)) for number, hint in enumerate(hints)
    )
    assert mortal == also
    assert len({*plain, *mortal, *pinned}) == 3


def test_a_priority_is_part_of_how_it_ended(serving: Serving) -> None:
    hints = [None, RequestHints(priority="low"), RequestHints(priority="high"), RequestHints(keep=False)]
    told = [told_of(serving, ask(serving, 100 * number, TOOL, hint)) for number, hint in enumerate(hints)]
    assert len({each for ends in told for each in ends}) == 4


def test_a_prompt_that_was_there_ends_as_its_last_answer_did(serving: Serving) -> None:
    prompt = [*range(8)]
    for answer in (TOOL, TURN, TOOL):
        request = serving.send([*prompt, 20], answer)
        serving.drain()
        classes = told_of(serving, request)
        assert classes == {serving.side._turns._endings._classes[tuple(answer), None]}


def test_one_that_was_preempted_ends_the_turn_that_it_began(serving: Serving) -> None:
    request = serving.send(range(8), [1, 2, 3, *TOOL])
    while request.num_output_tokens < 2:
        serving.step()
    [number] = [turn.number for turn in serving.side._turns._turns.values()]
    serving.preempt(request)
    ask(serving, 100, TURN)
    assert request.state is State.COMPLETED
    ends = told_of(serving, request)
    assert 0 not in ends
    uses = [node.rank.last_use for node in serving.side.allocator._tree.nodes()]
    assert number in uses, "it has not asked twice"


def test_the_next_turn_knows_how_the_one_before_ended(serving: Serving) -> None:
    """From the pool or, once that is gone, from what the policy remembers of it."""
    befores = []
    for first, answer in ((0, [1, 2, *TOOL]), (100, [1, 2, *TURN])):
        request = ask(serving, first, answer)
        again = serving.send([*request.token_ids, 7, 8], TURN)
        serving.step()
        allocator = serving.side.allocator
        node, _ = allocator._tree.find(again.block_hashes, 6)
        kinds = {ending_of(each.rank.kind) for each in allocator._tree.path(node)}
        assert kinds == {0}, "it has not ended yet"
        befores.append(node.rank.kind)
        serving.drain()
        assert 0 not in told_of(serving, again)
    assert befores[0] != befores[1]


def test_pools_of_other_sizes_are_told_the_same(serving: Serving) -> None:
    """Of prompts; their answers are stored there, too."""
    miniatures = serving.side._other_sizes.miniatures
    assert miniatures is not None and miniatures.rate == 1
    miniatures._timer = lambda: 0.0  # a busy machine leaves it as much time as an idle one
    requests = [ask(serving, 100 * number, answer) for number, answer in enumerate(([1, *TOOL], TURN))]
    serving.drain()
    for pool in miniatures._pools[1:]:  # the smallest lacks some
        for request in requests:
            node, depth = pool._tree.find(request.block_hashes, len(request.block_hashes))
            assert depth == (request.num_tokens - 1) // 2
            assert {ending_of(each.rank.kind) for each in pool._tree.path(node)} == told_of(serving, request)


def test_pools_of_other_sizes_learn_from_endings_as_the_pool_does() -> None:
    """They find what a pool of their size finds that is told how answers end."""
    now = [0.0]
    rng = random.Random(2)
    miniatures = Miniatures(60, "hazard", lambda: now[0], lambda: 0.0)
    pools = [
        CpuOffloadingBlockAllocator(
            round(60 * each), policy=make_policy("hazard", round(60 * each), lambda: now[0])
        )
        for each in SIZES
    ]
    hits = [0] * len(pools)
    due = [(rng.uniform(0, 100), session, 0) for session in range(40)]
    heapify(due)
    for _ in range(1500):
        now[0], session, turn = heappop(due)
        chain = hash_chain([session, *range(8 + turn % 12)], 1)
        ending = rng.choice((1, 2))
        heappush(due, (now[0] + rng.expovariate(1 / (5 if ending == 1 else 300)), session, turn + 1))
        sample = miniatures.asked(chain)
        miniatures.finished(sample, [], ending)
        miniatures.step()
        for index, pool in enumerate(pools):
            served = serve(pool, chain)
            hits[index] += served.depth
            pool.ended(chain, served.turn, ending)
    num_asked, missed = miniatures.take()
    assert [num_asked - each for each in missed] == hits
    miniatures.check_invariants()
