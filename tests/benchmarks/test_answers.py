"""The benchmark of answers: whose blocks the next turn's prompt has; and what "auto" is held to."""

import json
from itertools import pairwise
from pathlib import Path

import pytest

from benchmarks.answers import __main__ as answers
from benchmarks.answers.__main__ import SCENES, run, scenes
from benchmarks.engine_replay.conversations import Conversations, Template
from benchmarks.engine_replay.engine import own_hash
from benchmarks.engine_replay.workloads import ReplayRequest
from benchmarks.trace_replay.turns import chains_of, next_turns, replay_turns
from offload.observe.trace import TraceRequest
from tests.benchmarks.conftest import Refusal
from tests.seeds import OTHER_SEEDS

BLOCK = 4
fixed_seed = pytest.mark.skipif(OTHER_SEEDS != 0, reason="how much is found is up to the seeds")


def turns_of(template: Template) -> list[ReplayRequest]:
    """The first conversation of a single user."""
    return list(Conversations(templates=(template,), users=1, requests=5, turns=5).ask(seed=0))


@pytest.mark.parametrize("returns", [True, False])
def test_the_next_prompt_has_the_answer_or_not(returns: bool) -> None:
    for before, after in pairwise(turns_of(Template("talk", returns, continues=1.0))):
        num_prompt = before.num_prompt // BLOCK
        assert len(before.hashes) == num_prompt and after.hashes[:num_prompt] == before.hashes
        num_all = (before.num_prompt + before.num_output) // BLOCK
        answer = [own_hash(before.req_id, block) for block in range(num_prompt, num_all)]
        assert answer and (after.hashes[num_prompt:num_all] == answer) is returns
        assert set(answer).isdisjoint(after.hashes) is not returns


def test_conversations_begin_alike_or_not() -> None:
    for is_shared in (True, False):
        first, second = turns_of(Template("talk", True, continues=0.0, is_shared=is_shared))[:2]
        assert (first.hashes[0] == second.hashes[0]) is is_shared


@pytest.mark.parametrize("name", SCENES)
def test_a_turn_comes_long_after_the_one_before(name: str) -> None:
    """So that it is answered by then: with every user between, and 16 requests under way."""
    traffic = SCENES[name].traffic
    assert traffic.users >= 48
    requests = list(traffic.ask(seed=0))
    assert len(requests) == traffic.requests
    longest = max(request.num_prompt + request.num_output for request in requests)
    assert longest <= traffic.turns * (traffic.prompt_tokens[1] + traffic.answer_tokens[1]) + 256


TRACE = [
    TraceRequest(0.0, 1_100, 400, (1, 2)),
    TraceRequest(1.0, 600, 100, (7,)),
    TraceRequest(60.0, 2_100, 100, (1, 2, 3, 4)),
    TraceRequest(61.0, 1_200, 100, (1, 2)),
]


def test_turns_are_found_in_a_trace() -> None:
    """By the longest prompt that another one begins with, if there is room for its answer."""
    assert next_turns(TRACE) == [2, None, None, None]


@pytest.mark.parametrize("returns", [True, False])
def test_an_answer_of_a_trace_is_what_the_next_prompt_has(returns: bool) -> None:
    first, alone, after, _ = chains_of(TRACE, returns)
    assert len(first) == 1_500 // 64 and len(alone) == 700 // 64
    num_prompt = 1_100 // 64
    assert first[:num_prompt] == after[:num_prompt]
    assert (first[num_prompt:] == after[num_prompt : len(first)]) is returns
    assert set(alone).isdisjoint([*first, *after])


def test_a_trace_is_told_in_rows() -> None:
    rows = list(replay_turns("small", TRACE, 0))
    assert len(rows) == 2 * 3 * 3
    whole = [row for row in rows if row["pool"] == "100%"]
    assert [row["hit_tokens"] for row in whole] == [2_496, 2_112, 2_496, 2_112, 2_112, 2_112]


def test_a_pool_has_a_block_at_least() -> None:
    (request,) = TRACE[1:2]
    assert all(row["hit_tokens"] == 0 for row in replay_turns("single", [request], 0))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["nowhere.jsonl"], "--trace: [Errno 2] No such file or directory: 'nowhere.jsonl'"),
        (["good.jsonl", "bad.jsonl"], "--trace: bad.jsonl, line 1: 'no' is not JSON"),
        (["empty.jsonl"], "--trace: empty.jsonl: has no requests"),
        (["short.jsonl"], "--trace: short.jsonl: no prompt fills a block of 512 tokens"),
        (["."], "--trace: [Errno 21] Is a directory: '.'"),
        ([], "--trace: expected at least one argument"),
    ],
)
def test_traces_that_are_refused(
    given: list[str],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    refusal: Refusal,
) -> None:
    monkeypatch.chdir(tmp_path)
    request = {"timestamp": 0, "input_length": 512, "output_length": 1}
    Path("good.jsonl").write_text(json.dumps({**request, "hash_ids": [1]}))
    Path("short.jsonl").write_text(json.dumps({**request, "input_length": 511, "hash_ids": []}))
    Path("bad.jsonl").write_text("no\n")
    Path("empty.jsonl").touch()
    assert message in refusal(answers, "--trace", *given)


@fixed_seed
@pytest.mark.parametrize("name", ["chat", "sparse 10%", "to chat", "mixed", "mixed, alike"])
def test_where_answers_come_back_as_much_is_found(name: str) -> None:
    """Beside an engine that stores all of them: 1% less at most. A smaller pool adds the policy's luck."""
    scene = scenes(600)[name]
    auto, with_all = (run(scene, store) for store in ("auto", True))
    assert 0.99 * with_all["hit_tokens"] <= auto["hit_tokens"], (auto, with_all)


@fixed_seed
@pytest.mark.parametrize(
    ("name", "is_small"),
    [("stripped", False), ("stripped", True), ("one-shot", False), ("to stripped", False)],
)
def test_where_they_do_not_they_are_left_out(name: str, is_small: bool) -> None:
    """After 200 answers, at the beginning and after a switch: nine in ten blocks at least."""
    scene = scenes(600)[name]
    auto, with_all = (run(scene, store, is_small=is_small) for store in ("auto", True))
    assert with_all["answer_blocks_after"] > 100, "the test is blind"
    assert auto["answer_blocks_after"] <= 0.1 * with_all["answer_blocks_after"], (auto, with_all)
