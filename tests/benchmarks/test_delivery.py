"""Prefill engines deliver: all of a burst is stored, whatever a step computes and a copy takes."""

import pytest

from benchmarks.delivery.__main__ import CHUNKS, COPIES, PROMPTS, deliver


@pytest.mark.parametrize("copy", COPIES)
@pytest.mark.parametrize("chunk", CHUNKS)
def test_all_blocks_of_a_burst_are_stored(chunk: int, copy: int) -> None:
    outcome = deliver("prefill", chunk, copy)
    assert outcome.stored == 1.0 and outcome.told == PROMPTS


def test_a_cache_alone_stores_less_of_it() -> None:
    outcome = deliver("both", 768, 12)
    assert 0 < outcome.stored < 0.5 and outcome.told == 0, "the test above is blind"
