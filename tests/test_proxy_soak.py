"""Hundreds of requests to the proxy over engines that misbehave; ``python -m tests.proxy_soak`` asks more."""

import asyncio
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from offload.proxy.transcript import Transcript
from tests.proxy_soak.run import Told, soak
from tests.seeds import OTHER_SEEDS

REQUESTS = 400


@pytest.fixture(autouse=True)
def engines_fail_in_silence() -> Iterator[None]:
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    yield
    logging.disable(before)


def soaked(seed: int = 0) -> Told:
    return asyncio.run(soak(REQUESTS, OTHER_SEEDS + seed, at_a_time=16, has_hangs=False))


@pytest.mark.parametrize("seed", range(2))
def test_every_answer_is_whole_whatever_engines_do(seed: int) -> None:
    told = soaked(seed)
    assert told.wrong == [] and told.left_behind == []
    assert sum(told.outcomes.values()) == REQUESTS
    assert sum(told.faults.values()) > REQUESTS / 8, told.faults
    assert told.outcomes["whole"] > 0.8 * REQUESTS, told.outcomes


def test_an_answer_that_begins_again_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    begin = Transcript.begin_leg

    def begin_anew(transcript: Transcript) -> None:
        transcript.tokens = []
        begin(transcript)

    monkeypatch.setattr(Transcript, "begin_leg", begin_anew)
    assert any("text" in why or "token" in why for _, why in soaked().wrong)


def test_an_answer_that_goes_on_inside_a_character_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def settle(_: Any, __: Any, transcript: Transcript, *___: Any) -> None:
        transcript.is_sure = True

    monkeypatch.setattr("offload.proxy.relay.settle", settle)
    assert any("text" in why for _, why in soaked().wrong)


def test_work_that_is_left_at_an_engine_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    class Kept(set[Any]):
        def discard(self, _: Any) -> None:
            pass

    monkeypatch.setattr("offload.proxy.members.set", Kept, raising=False)
    assert any("legs" in each for each in soaked().left_behind)
