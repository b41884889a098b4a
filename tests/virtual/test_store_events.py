"""KV events of a store that engines share: what this engine has written, in vLLM's words."""

from collections.abc import Iterator
from typing import Any

import pytest
from vllm.distributed.kv_events import BlockRemoved, BlockStored

from offload.scheduler.tiers.beliefs import FRESH_SECONDS
from offload.testing.media.faulty import MediumFault
from offload.vllm import kv_events
from offload.worker.media.base import Verb
from tests.virtual.driver import come_to_rest, forget_gpu, publish_events, serve, tokens
from tests.virtual.test_event_storms import watch_events
from tests.virtual.test_stores import Stored
from tests.virtual.test_tiers import BLOCK, POSITIONS, PROMPT

NUM_EXTENTS = 15


class Told:
    """A subscriber to what an engine says of the store."""

    def __init__(self, stored: Stored) -> None:
        self._stored = stored
        self._steps = watch_events(stored.engine)
        self.hashes = list[Any]()
        self.removed = set[Any]()

    def take(self) -> list[Any]:
        """All that is known now."""
        engine = self._stored.engine
        come_to_rest(engine)
        while engine.scheduler.connector._events.is_behind:
            engine.scheduler.connector.take_events()
        for event in [each for step in self._steps for each in step if each.medium == "STORAGE"]:
            assert event.locality == "REMOTE"
            if isinstance(event, BlockStored):
                assert event.block_size == POSITIONS * BLOCK
                assert not set(event.block_hashes) & set(self.hashes)
                self.hashes += event.block_hashes
            else:
                assert isinstance(event, BlockRemoved)
                for each in event.block_hashes:
                    self.hashes.remove(each)
                self.removed.update(event.block_hashes)
        self._steps.clear()
        return self.hashes


@pytest.fixture(params=[1, 3], ids=["one rank", "three ranks"])
def stored(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stored]:
    publish_events(monkeypatch)
    monkeypatch.setattr(kv_events, "MAX_HASHES", 4)
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "0")
    stored = Stored(request.param)
    yield stored
    stored.end()


def test_what_was_written_is_told(stored: Stored) -> None:
    """By the hash that the GPU's events have of the last block of an extent."""
    told = Told(stored)
    request = serve(stored.engine, PROMPT)
    assert told.take() == request.block_hashes[POSITIONS - 1 :: POSITIONS][:NUM_EXTENTS]


def test_what_could_not_be_written_is_not(stored: Stored) -> None:
    told = Told(stored)
    stored.fault(Verb.PUT, MediumFault.FAIL)
    stored.ask()
    assert told.take() == []


def test_what_another_engine_has_written_that_one_tells(stored: Stored) -> None:
    stored.ask()
    other = Stored(stored.engine.settings.num_ranks, store=stored.store)
    told = Told(other)
    other.ask()
    assert told.take() == []
    other.end()


def test_what_is_missed_is_taken_back_and_told_when_it_was_written_again(stored: Stored) -> None:
    told = Told(stored)
    stored.ask()
    before = list(told.take())
    for key in [key for key, each in stored.store.kept.items() if each.depth >= 6]:
        stored.store.evict(key)
    assert told.take() == before, "nobody has noticed"
    stored.evict()
    stored.wait(FRESH_SECONDS + 1)
    stored.ask()
    told.take()
    assert told.removed & set(before) == set(before[6:])
    for _ in range(3):
        stored.ask()
        forget_gpu(stored.engine)
        assert set(told.take()) == {key.name for key in stored.store.kept}
    assert set(told.hashes) & set(before[6:]), "what was computed again is told again"


def test_after_a_reset_nothing_is_and_what_is_written_then(stored: Stored) -> None:
    told = Told(stored)
    stored.ask()
    before = list(told.take())
    assert stored.engine.reset()
    serve(stored.engine, [1])
    assert told.take() == []
    stored.ask()
    assert told.take() == before, "it is this engine's alone, and this engine serves it"
    forget_gpu(stored.engine)
    assert stored.engine.reset()
    serve(stored.engine, tokens(3))
    assert told.take() == []
