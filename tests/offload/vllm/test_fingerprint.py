"""Who does not see the cache as the scheduler does is refused, at start or, failing that, plan by plan."""

import pytest

from offload import UnsupportedError
from offload.messages import Fingerprint
from offload.testing.virtual import VirtualEngine
from offload.vllm.connector import CpuOffloadConnector
from offload.vllm.fingerprint import check_fingerprint
from tests.virtual.driver import depth_of, make_engine, serve, tokens

OURS = Fingerprint("1.0", "0.32.0", 2, 16, "torch.bfloat16", "BLHNC")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("kv_offload", "1.1"),
        ("vllm", "0.31.0"),
        ("world_size", 4),
        ("block_size", 32),
        ("dtype", "fp8 (torch.float16)"),
        ("layout", "LBHNC"),
    ],
)
def test_a_difference_is_named_with_both_values(field: str, value: object) -> None:
    check_fingerprint(OURS, OURS, "nobody")
    theirs = OURS._replace(**{field: value})
    with pytest.raises(UnsupportedError, match="the worker does not fit the scheduler") as refusal:
        check_fingerprint(OURS, theirs, "the worker")
    for part in (field, repr(value), repr(getattr(OURS, field)), "the same installation"):
        assert part in str(refusal.value)
    assert str(refusal.value).count(" there and ") == 1


def test_of_an_engine() -> None:
    engine = make_engine(num_ranks=2, block_outermost=True)
    connector = engine.scheduler.connector
    assert isinstance(connector, CpuOffloadConnector)
    taken = connector._fingerprint
    assert taken[2:] == (2, engine.settings.block_size, "auto (torch.float32)", "BLHNC", "full")
    assert all(rank.connector._fingerprint == taken for rank in engine.ranks)
    engine.close()


@pytest.mark.parametrize(("shape", "block_size"), [({"dcp": 2}, 8), ({"pcp": 2}, 4), ({"stages": 2}, 4)])
def test_of_ranks_that_share_blocks(shape: dict[str, int], block_size: int) -> None:
    """Equal on all ranks; a rank that thinks it has all tokens of a block differs."""
    engine = make_engine(num_ranks=2, **shape)
    taken = [connector._fingerprint for connector in (engine.scheduler.connector, engine.ranks[1].connector)]
    assert taken[0] == taken[1] and taken[0].world_size == 2
    assert taken[0].block_size == engine.side.block_size == block_size
    engine.close()


def other_worker(engine: VirtualEngine) -> None:
    """The last rank's process was started from another installation."""
    facts = engine.ranks[-1].side.facts
    facts.fingerprint = facts.fingerprint._replace(kv_offload="another")


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_worker_that_differs_is_refused_at_start(num_ranks: int) -> None:
    engine = make_engine(num_ranks=num_ranks)
    other_worker(engine)
    facts = {(0, index): rank.connector.get_handshake_metadata() for index, rank in enumerate(engine.ranks)}
    with pytest.raises(UnsupportedError, match=f"tensor rank {num_ranks - 1} .*kv_offload is 'another'"):
        engine.scheduler.connector.set_xfer_handshake_metadata_pp_aware(facts)
    engine.close()


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_worker_that_differs_carries_out_no_plan(num_ranks: int) -> None:
    """Where there is no handshake: nothing is stored, nothing is loaded, and requests are served."""
    engine = make_engine(num_ranks=num_ranks)
    request = serve(engine, tokens(20))
    assert depth_of(engine, request) == 5
    other_worker(engine)
    assert engine.reset(connector=False)
    again = serve(engine, tokens(20), 3)
    assert again.num_output_tokens == 3
    engine.audit.check_drained()
    assert engine.copiers[-1].copied.total() == 5 * engine.settings.slot_bytes
    engine.close()
