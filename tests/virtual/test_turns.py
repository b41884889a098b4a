"""How answers end, on the real scheduler: chains of answers after which the next turn comes are kept."""

import random
from typing import Any

import pytest
from vllm.v1.request import Request

from offload.testing.virtual import VirtualEngine
from offload.vllm.engine import VllmEngine
from tests.virtual.driver import Engines, come_to_rest, depth_of

ASKED, TOOL, LAST, STOP = 500, 501, 502, 503
"""Tokens. A prompt ends with ``ASKED`` and the kind of its answer, an answer with its kind and ``STOP``."""

ANSWER = 4  # tokens
TURNS = 100
SIZES = {"gpu_blocks": 64, "cpu_slots": 80, "chunk": 128, "step_seconds": 2.0, "verify_loads": "never"}


def speak(engine: VirtualEngine) -> None:
    """Have the model answer as the prompt wants."""

    def accepted(chain: Any, drafts: list[int]) -> list[int]:
        behind = chain.tokens[::-1].index(ASKED)
        kind = chain.tokens[-behind]
        token: int = {ANSWER - 1: kind, ANSWER: STOP}.get(behind, 400 + behind)
        chain.extend([token])
        return [token]

    engine.runner.drafter.accepted = accepted  # type: ignore[method-assign]


class Session:
    """Turns with prompts that begin with all that was said before."""

    def __init__(self, engine: VirtualEngine) -> None:
        self.engine = engine
        self.number = engine.counts["sessions"]
        engine.counts["sessions"] += 1
        self.tokens = [(self.number * 31 + 7 * index) % 400 for index in range(30)]
        self.turns: list[Request] = []

    def ask(self, kind: int) -> None:
        """The next turn, whose answer ends so. All comes to rest."""
        said = [(self.number * 17 + len(self.turns) * 5 + index) % 400 for index in range(6)]
        request = self.engine.add([*self.tokens, *said, ASKED, kind], 4 * ANSWER)
        assert request.sampling_params is not None
        request.sampling_params.stop_token_ids = [STOP]
        self.engine.drain(500)
        self.tokens = list(request.all_token_ids)
        assert self.tokens[-2:] == [kind, STOP]
        self.turns.append(request)

    def depth(self) -> int:
        """Blocks of it that the pool has."""
        return depth_of(self.engine, self.turns[-1])


def learn(engine: VirtualEngine, rng: random.Random) -> None:
    """Sessions take turns. What ended with ``TOOL`` comes back, what ended with ``LAST`` does not."""
    active: list[Session] = []
    for _ in range(TURNS):
        active += [Session(engine) for _ in range(6 - len(active))]
        session = rng.choice(active)
        is_last = len(session.turns) >= 5 or (len(session.turns) > 0 and rng.random() < 0.4)
        session.ask(LAST if is_last else TOOL)
        if is_last:
            active.remove(session)


def kept(engine: VirtualEngine) -> list[tuple[int, int]]:
    """Blocks left of two alike sessions that end with ``TOOL`` and later ``LAST``, after others came."""
    left = []
    for _ in range(2):
        pair = Session(engine), Session(engine)
        for session, kind in zip(pair, (TOOL, LAST), strict=True):
            for each in (TOOL, TOOL, kind):
                session.ask(each)
        for _ in range(5):
            Session(engine).ask(TOOL)
        left.append((pair[0].depth(), pair[1].depth()))
    return left


@pytest.mark.parametrize("seed", range(2))
def test_chains_that_come_back_outlive_those_that_do_not(engines: Engines, seed: int) -> None:
    engine = engines(**SIZES)
    speak(engine)
    learn(engine, random.Random(seed))
    whole = 16  # blocks of three turns, without the last token
    for tool, last in kept(engine):
        assert tool == whole > 2 * last, "the one that was used later is evicted first"
    come_to_rest(engine)
    assert not engine.side.left_over()


def test_without_endings_what_was_used_later_is_kept(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So what the test above sees is theirs."""
    monkeypatch.setattr(VllmEngine, "ending", lambda self, request: None)
    engine = engines(**SIZES)
    speak(engine)
    learn(engine, random.Random(0))
    assert all(tool < last for tool, last in kept(engine))


def test_how_requests_of_a_scheduler_end(engines: Engines, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the model, by their length, by their client, and without an answer."""
    told: list[object] = []
    ending = VllmEngine.ending

    def watched(self: VllmEngine, request: Request) -> object:
        told.append(ending(self, request))
        return told[-1]

    monkeypatch.setattr(VllmEngine, "ending", watched)
    engine = engines(**SIZES)
    speak(engine)
    Session(engine).ask(TOOL)
    prompt = [*range(8), ASKED, TOOL]
    engine.add(prompt, 2)
    engine.drain()
    engine.add(prompt, 1, is_pooled=True)
    engine.drain()
    aborted = engine.add(prompt, 9)
    while aborted.num_output_tokens < 2:
        engine.step()
    engine.abort(aborted.request_id)
    engine.abort(engine.add(prompt, 9).request_id)
    come_to_rest(engine)
    assert told == [(TOOL, STOP), "FINISHED_LENGTH_CAPPED", None, "FINISHED_ABORTED", None]
    assert not engine.side.left_over()
