"""KV events on vLLM's real scheduler have token ids, of which vLLM's own function makes their hashes."""

import random
from collections import Counter
from typing import Any

import pytest
from vllm.distributed.kv_events import BlockStored
from vllm.lora.request import LoRARequest
from vllm.v1.core import kv_cache_utils
from vllm.v1.core.kv_cache_utils import hash_block_tokens

from offload.scheduler.tiers.tier import TierLimits
from offload.settings import Admit
from offload.testing.virtual import MODELS, VirtualEngine, VirtualSettings, run_seed
from offload.testing.virtual.parts import make_hash
from offload.vllm import kv_events
from tests.virtual.driver import come_to_rest, forget_gpu, publish_events, serve, tokens
from tests.virtual.test_peers import Pair
from tests.virtual.test_stores import Stored
from tests.virtual.test_tiers import PROMPT, Tiered

LIMITS = TierLimits(policy="lru", admit=Admit.ALL, bytes_per_day=1e12, least_tokens=8)
KINDS = ["plain", "draft", "replica", "tier", "store", "several", "siblings", "hand-offs", "resize", "fleet"]
NOWHERE = "/nowhere"
HYBRIDS = ["window", "windows", "mixed", "mamba_window"]


class Reader:
    """Hashes what an engine publishes, as an index would.

    Attributes:
        spelled: blocks that were checked, by medium and kind of their group.
        silent: blocks that came without token ids, the same.
    """

    def __init__(self, engine: VirtualEngine) -> None:
        self._hash = make_hash(engine.scheduler.vllm_config)
        self._size = engine.sizes.hashes
        self.position = engine.sizes.scheduler
        self.spelled: Counter[tuple[str, str]] = Counter()
        self.silent: Counter[tuple[str, str]] = Counter()
        engine.scheduler.kv_cache_manager.block_pool.enable_kv_cache_events = True
        engine.scheduler.kv_event_publisher.publish = self._hear

    def _hear(self, batch: Any) -> None:
        for event in batch.events:
            if isinstance(event, BlockStored) and (event.medium != "GPU" or is_full(event)):
                key = event.medium, event.kv_cache_spec_kind or ""
                if event.token_ids:
                    assert hashes_of(event, self._hash, self._size) == event.block_hashes, event
                    self.spelled[key] += len(event.block_hashes)
                else:
                    assert event.extra_keys is None and event.lora_name is None
                    self.silent[key] += len(event.block_hashes)


def is_full(event: BlockStored) -> bool:
    return event.kv_cache_spec_kind == "full_attention"


def hashes_of(event: BlockStored, function: Any, size: int) -> list[Any]:
    """Made of what it says: a block may be several hashed ones."""
    assert len(event.token_ids) == len(event.block_hashes) * event.block_size
    extra_keys = event.extra_keys or [None] * len(event.block_hashes)
    assert len(extra_keys) == len(event.block_hashes)
    before, hashes = event.parent_block_hash, []
    for index, keys in enumerate(extra_keys):
        for start in range(index * event.block_size, (index + 1) * event.block_size, size):
            own = [tagged(key, event.lora_name) for key in keys or ()]
            own = [key for key in own if key[0] == "lora" or start % event.block_size == 0]
            piece = event.token_ids[start : start + size]
            before = hash_block_tokens(function, before, piece, tuple(own) or None)
        hashes.append(before)
    return hashes


def tagged(key: Any, lora_name: str | None) -> tuple[str, ...]:
    """As vLLM hashes it; ``key`` as it publishes it, without the adapter's path."""
    return ("lora", key, NOWHERE) if key == lora_name else ("cache_salt", key)


@pytest.fixture
def readers(monkeypatch: pytest.MonkeyPatch) -> list[Reader]:
    """One for each engine that begins, of which all publish events."""
    readers: list[Reader] = []
    original = VirtualEngine.__init__

    def read(engine: VirtualEngine, *arguments: Any) -> None:
        original(engine, *arguments)
        readers.append(Reader(engine))

    publish_events(monkeypatch)
    monkeypatch.setattr(kv_events, "MAX_HASHES", 40)
    monkeypatch.setenv("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "0")
    monkeypatch.setattr(VirtualEngine, "__init__", read)
    return readers


def counts_of(readers: list[Reader], medium: str) -> tuple[int, int]:
    """Blocks of full attention there: with token ids, and without."""
    key = medium, "full_attention"
    return sum(each.spelled[key] for each in readers), sum(each.silent[key] for each in readers)


@pytest.mark.parametrize("kind", KINDS)
def test_hashes_are_made_of_the_tokens_in_random_runs(readers: list[Reader], kind: str) -> None:
    """Copies that fail, aborts, preemptions, salts, evictions, resets, restarts."""
    for seed in range(4):
        run_seed(seed, turns=120, kind=kind)
    spelled, silent = counts_of(readers, "CPU")
    assert spelled > 20 and (not silent or kind == "siblings"), "of an adopted pool nobody knows the tokens"


@pytest.mark.parametrize("kind", HYBRIDS)
def test_the_same_of_hybrids(readers: list[Reader], kind: str) -> None:
    """Bags, too, where their blocks are as long as a position."""
    for seed in range(3):
        run_seed(seed, turns=120, kind=kind)
    assert not counts_of(readers, "CPU")[1]
    assert sum((each.spelled for each in readers), Counter[Any]()).total() > 20


def test_bags_are_spelled_from_before_the_store_that_has_them(readers: list[Reader]) -> None:
    """The windows of an answer's end reach back into its prompt, which was stored long before."""
    engine = VirtualEngine(
        VirtualSettings(groups=MODELS["window"], gpu_blocks=120, cpu_slots=200, chunk=16), random.Random(0)
    )
    for last in (50, 66, 82):
        serve(engine, tokens(last))
        come_to_rest(engine)
    [reader] = readers
    windows = "CPU", "sliding_window"
    sizes = {group.block_size for group in engine.settings.groups if group.kind == "window"}
    assert (reader.spelled[windows] > 0) == (sizes == {reader.position})
    assert bool(reader.silent[windows]) == (sizes != {reader.position})
    engine.close()


@pytest.mark.parametrize("make", [Tiered, Stored])
def test_what_is_written_below_is_spelled(readers: list[Reader], make: type[Tiered]) -> None:
    """By what the slots held; and what comes up again is, by the request that it is for."""
    tiered = make(2, limits=LIMITS)
    serve(tiered.engine, PROMPT, salt="salt")
    for first in range(3):
        tiered.ask(tokens(len(PROMPT), first=first))
    forget_gpu(tiered.engine)
    spelled, silent = counts_of(readers, "STORAGE")
    assert spelled >= 3 * 15 and silent <= 15
    before = counts_of(readers, "CPU")[0]
    assert tiered.ask(PROMPT) < len(PROMPT)
    assert counts_of(readers, "CPU")[0] > before and not counts_of(readers, "CPU")[1]
    come_to_rest(tiered.engine)
    tiered.restart()
    serve(tiered.engine, [1])
    assert counts_of(readers[1:], "STORAGE")[0] == 0, "an earlier engine had the tokens"
    tiered.ask(PROMPT)
    assert counts_of(readers[1:], "CPU")[0] > 30 and not counts_of(readers, "CPU")[1]
    tiered.engine.close()


def test_what_comes_from_a_peer_is_spelled(readers: list[Reader]) -> None:
    pair = Pair()
    pair.compute()
    assert pair.ask() < len(PROMPT)
    assert counts_of(readers[1:], "CPU")[0] >= 60 and not counts_of(readers, "CPU")[1]
    pair.end()


def test_adapters_and_salts_are_told(readers: list[Reader]) -> None:
    engine = VirtualEngine(VirtualSettings(gpu_blocks=120, cpu_slots=200), random.Random(0))
    seen = list[Any]()
    take = engine.scheduler.connector.take_events

    def watched() -> Any:
        events = list(take())
        seen.extend(each for each in events if isinstance(each, BlockStored))
        return events

    engine.scheduler.connector.take_events = watched
    adapter = LoRARequest("adapter", 3, NOWHERE)
    serve(engine, tokens(40), lora=adapter)
    serve(engine, tokens(40), salt="salt")
    serve(engine, tokens(40))
    come_to_rest(engine)
    assert {(each.lora_id, each.lora_name) for each in seen} == {(3, "adapter"), (None, None)}
    keys = [each.extra_keys for each in seen]
    assert next(each[:2] for each in keys if each and each[0] == ("salt",)) == [("salt",), None]
    assert all(each == ("adapter",) for each in next(each for each in keys if each and each[0] != ("salt",)))
    assert keys[-1] is None
    assert counts_of(readers, "CPU") == (30, 0)
    engine.close()


def test_nothing_is_spelled_without_events(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is asked of a request, and no plan has a note."""
    engine = VirtualEngine(VirtualSettings(gpu_blocks=120, cpu_slots=200), random.Random(0))

    def spelled(*arguments: Any) -> None:
        raise AssertionError("somebody wanted to know")

    monkeypatch.setattr(type(engine.side._engine), "spelled", spelled)
    serve(engine, tokens(40))
    come_to_rest(engine)
    assert engine.side.allocator.num_resident
    engine.close()


def test_the_reader_notices(readers: list[Reader]) -> None:
    """vLLM's own events pass it; a token that is another does not."""
    engine = VirtualEngine(VirtualSettings(gpu_blocks=120, cpu_slots=200), random.Random(0))
    assert kv_cache_utils.NONE_HASH
    serve(engine, tokens(40))
    come_to_rest(engine)
    [reader] = readers
    assert reader.spelled["GPU", "full_attention"] == 10
    block_hash = hash_block_tokens(reader._hash, None, [1, 2, 3, 4])
    event = BlockStored([block_hash], None, [1, 2, 3, 4], 4, None, "CPU", None)
    assert hashes_of(event, reader._hash, 4) == [block_hash]
    event.token_ids[2] = 4
    assert hashes_of(event, reader._hash, 4) != [block_hash]
    engine.close()
