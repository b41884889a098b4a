"""Counts of blocks: properties, and the cases that trip straightforward connectors."""

from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from offload.scheduler.amounts import (
    answer_run_blocks,
    blocks_to_run,
    first_part_blocks,
    holdable_blocks,
    is_worth_storing,
    load_parts,
    load_range,
    loadable_tokens,
    may_load,
    restorable_blocks,
    storable_blocks,
    storable_blocks_at_finish,
    tokens_to_next_look,
)
from tests.strategies import thorough

COUNTS = st.integers(0, 300)
BLOCK_SIZES = st.sampled_from([1, 2, 16, 128])


class TestStorableBlocks:
    @pytest.mark.parametrize(
        ("num_computed", "num_scheduled", "num_tokens", "num_hashes", "blocks"),
        [
            (0, 16, 16, 1, 1),  # planned before the engine counts this step's tokens as computed
            (0, 15, 40, 2, 0),  # a chunk that fills no block
            (16, 16, 40, 2, 2),  # the next chunk does
            (31, 1, 32, 2, 2),  # decoding: the token computed now fills the block
            (30, 1, 32, 2, 1),
            (28, 8, 32, 2, 2),  # four drafts behind 32 known tokens: they are not known, nor hashed
            (47, 5, 49, 3, 3),  # optimistic by tokens not sampled yet
            (64, 1, 65, 3, 3),  # a hash is not there yet
            (64, 0, 64, 4, 4),
        ],
    )
    def test_what_is_known_hashed_and_computed(
        self, num_computed: int, num_scheduled: int, num_tokens: int, num_hashes: int, blocks: int
    ) -> None:
        assert storable_blocks(num_computed + num_scheduled, num_tokens, num_hashes, 16) == blocks

    @given(computed=COUNTS, tokens=COUNTS, hashes=COUNTS, block_size=BLOCK_SIZES)
    @thorough(300)
    def test_is_the_most_that_every_bound_allows(
        self, computed: int, tokens: int, hashes: int, block_size: int
    ) -> None:
        def allowed(blocks: int) -> bool:
            end = blocks * block_size
            return end <= computed and end <= tokens and blocks <= hashes

        blocks = storable_blocks(computed, tokens, hashes, block_size)
        assert allowed(blocks)
        assert not allowed(blocks + 1)


class TestRestorableBlocks:
    @pytest.mark.parametrize(
        ("num_resident", "num_gpu_blocks", "num_volatile", "num_step_blocks", "blocks"),
        [
            (5, 9, 0, 0, 5),
            (5, 9, 1, 0, 4),  # the last one is computed again
            (1, 9, 1, 0, 0),
            (0, 9, 1, 0, 0),
            (8, 9, 0, 0, 8),  # all that the GPU gives out
            (8, 9, 0, 3, 5),  # three are to be left for drafts
            (8, 9, 1, 3, 5),
            (4, 3, 0, 3, 0),
        ],
    )
    def test_what_is_resident_but_not_volatile_and_leaves_blocks(
        self, num_resident: int, num_gpu_blocks: int, num_volatile: int, num_step_blocks: int, blocks: int
    ) -> None:
        assert restorable_blocks(num_resident, num_gpu_blocks, num_volatile, num_step_blocks) == blocks

    @given(resident=COUNTS, gpu=st.integers(1, 300), volatile=st.integers(0, 1), beside=st.integers(0, 9))
    @thorough(300)
    def test_is_the_most_that_can_be_admitted(
        self, resident: int, gpu: int, volatile: int, beside: int
    ) -> None:
        def allowed(blocks: int) -> bool:
            return blocks + volatile <= resident and blocks + beside < gpu

        blocks = restorable_blocks(resident, gpu, volatile, beside)
        assert blocks == 0 or allowed(blocks)
        assert not allowed(blocks + 1)


class TestBlocksToRun:
    @pytest.mark.parametrize(
        ("num_running", "num_prefill", "num_drafts", "blocks"),
        [(5, 0, 0, 5), (5, 17, 0, 7), (5, 0, 15, 5), (5, 0, 16, 10), (0, 16, 40, 1)],
    )
    def test_each_computes_a_token_and_its_drafts(
        self, num_running: int, num_prefill: int, num_drafts: int, blocks: int
    ) -> None:
        assert blocks_to_run(num_running, num_prefill, 16, num_drafts) == blocks


class TestWhenToLook:
    @pytest.mark.parametrize(
        ("num_full", "num_seen", "worth"),
        [
            (0, 0, False),
            (1, 0, True),  # of a prompt of ten blocks every one
            (9, 8, True),
            (10, 9, True),
            (10, 10, False),
            (13, 10, False),  # of the answer four at a time
            (14, 10, True),
            (17, 14, False),
            (18, 14, True),
            (14, 0, True),  # it was preempted and computed the beginning again
            (3, 5, True),  # the scheduler took tokens back
        ],
    )
    def test_a_prompt_is_stored_at_once_and_an_answer_in_runs(
        self, num_full: int, num_seen: int, worth: bool
    ) -> None:
        assert is_worth_storing(num_full, num_seen, 10, 4) == worth

    @given(
        num_prompt=st.integers(1, 100),
        num_answer=st.integers(0, 200),
        run=st.integers(1, 5),
        block_size=BLOCK_SIZES,
    )
    @thorough(200)
    def test_one_token_per_step_is_looked_at_in_time(
        self, num_prompt: int, num_answer: int, run: int, block_size: int
    ) -> None:
        """And not when nothing can have changed."""
        num_seen, look_at, num_prompt_blocks = 0, 1, num_prompt // block_size
        for num_computed in range(1, num_prompt + num_answer + 1):
            worth = is_worth_storing(num_computed // block_size, num_seen, num_prompt_blocks, run)
            assert worth == (look_at == num_computed) or num_computed == 1
            if look_at == num_computed:
                num_seen = num_computed // block_size if worth else num_seen
                steps = tokens_to_next_look(num_computed, num_seen, num_prompt_blocks, run, block_size)
                assert steps > 0
                look_at = num_computed + steps

    def test_an_answer_is_stored_a_few_hundred_tokens_at_a_time(self) -> None:
        assert [answer_run_blocks(block_size) for block_size in (16, 128, 512, 1024)] == [32, 4, 1, 1]


class TestStorableBlocksAtFinish:
    @pytest.mark.parametrize(
        ("num_computed", "num_unconfirmed", "num_prompt", "num_tokens", "num_hashes", "blocks"),
        [
            (31, 0, 20, 32, 2, 1),  # two hashes, but the last token was sampled and never computed
            (133, 0, 100, 132, 8, 8),  # speculation counted beyond the last token
            (129, 0, 100, 128, 8, 7),  # and there the last block holds a token never computed
            (32, 0, 32, 32, 2, 2),  # a prompt is computed whole, with no token sampled
            (32, 0, 32, 33, 2, 2),
            (33, 1, 16, 33, 2, 2),
            (33, 2, 16, 33, 2, 1),  # two of them were counted before they were sampled
            (0, 0, 40, 40, 2, 0),  # never ran
            (1, 2, 1, 1, 0, 0),  # nothing confirmed
        ],
    )
    def test_what_was_really_computed(
        self,
        num_computed: int,
        num_unconfirmed: int,
        num_prompt: int,
        num_tokens: int,
        num_hashes: int,
        blocks: int,
    ) -> None:
        assert (
            storable_blocks_at_finish(num_computed, num_unconfirmed, num_prompt, num_tokens, num_hashes, 16)
            == blocks
        )

    @given(
        computed=COUNTS,
        unconfirmed=st.integers(0, 4),
        prompt=COUNTS,
        output=COUNTS,
        hashes=COUNTS,
        block_size=BLOCK_SIZES,
    )
    @example(computed=129, unconfirmed=0, prompt=100, output=28, hashes=8, block_size=16)
    @thorough(300)
    def test_is_the_most_that_every_bound_allows(
        self, computed: int, unconfirmed: int, prompt: int, output: int, hashes: int, block_size: int
    ) -> None:
        last_computed = prompt + output - 1 if output else prompt

        def allowed(blocks: int) -> bool:
            end = blocks * block_size
            return end <= max(computed - unconfirmed, 0) and end <= last_computed and blocks <= hashes

        blocks = storable_blocks_at_finish(computed, unconfirmed, prompt, prompt + output, hashes, block_size)
        assert allowed(blocks)
        assert not allowed(blocks + 1)


class TestLoads:
    @pytest.mark.parametrize(
        ("resident", "num_local", "num_tokens", "tokens"),
        [
            (4, 0, 64, 64),  # a full hit is offered whole: the scheduler itself steps back one token
            (4, 0, 63, 48),  # but no token that is not there
            (9, 0, 64, 64),
            (4, 32, 100, 32),  # on top of what the GPU has
            (2, 32, 100, 0),
            (1, 32, 100, 0),  # the GPU has more
            (0, 0, 100, 0),
        ],
    )
    def test_offer(self, resident: int, num_local: int, num_tokens: int, tokens: int) -> None:
        assert loadable_tokens(resident, num_local, num_tokens, 16) == tokens

    @given(resident=COUNTS, local_blocks=COUNTS, num_tokens=COUNTS, block_size=BLOCK_SIZES)
    @thorough(300)
    def test_offers_are_whole_blocks_within_the_prompt(
        self, resident: int, local_blocks: int, num_tokens: int, block_size: int
    ) -> None:
        num_local = min(local_blocks, num_tokens // block_size) * block_size
        offer = loadable_tokens(resident, num_local, num_tokens, block_size)
        assert offer >= 0
        assert offer % block_size == 0
        assert num_local + offer <= num_tokens
        assert offer == 0 or (num_local + offer) // block_size <= resident
        one_more = num_local + offer + block_size
        is_one_token = num_tokens == 1  # which is never loaded
        assert one_more > num_tokens or one_more > resident * block_size or is_one_token

    @pytest.mark.parametrize(
        ("num_local", "most", "tokens"),
        [
            (0, None, 96),
            (0, 0, 0),
            (0, 15, 0),  # less than a block
            (0, 16, 16),
            (0, 47, 32),
            (32, 47, 32),  # counted from what the GPU has
            (24, 39, 24),  # up to the end of a block
            (32, 64, 64),
            (32, 10**400, 64),
            (96, 16, 0),
        ],
    )
    def test_offers_up_to_what_the_request_allows(
        self, num_local: int, most: int | None, tokens: int
    ) -> None:
        assert loadable_tokens(6, num_local, 200, 16, most) == tokens

    @pytest.mark.parametrize("local_blocks", range(4))
    def test_each_block_more_that_a_request_allows_is_offered(self, local_blocks: int) -> None:
        offers = [loadable_tokens(5, 16 * local_blocks, 100, 16, 16 * most) // 16 for most in range(7)]
        assert offers == [min(most, 5 - local_blocks) for most in range(7)]

    @given(
        resident=COUNTS,
        local_blocks=COUNTS,
        num_tokens=COUNTS,
        block_size=BLOCK_SIZES,
        most=st.integers(0, 400),
    )
    @thorough(200)
    def test_what_a_request_allows_only_takes_away(
        self, resident: int, local_blocks: int, num_tokens: int, block_size: int, most: int
    ) -> None:
        num_local = min(local_blocks, num_tokens // block_size) * block_size
        unlimited = loadable_tokens(resident, num_local, num_tokens, block_size)
        offer = loadable_tokens(resident, num_local, num_tokens, block_size, most)
        assert offer == min(unlimited, most // block_size * block_size)

    @pytest.mark.parametrize(
        ("num_local", "num_external", "positions"),
        [
            (0, 64, range(4)),
            (32, 48, range(2, 5)),  # behind what the GPU had at the lookup
            (32, 16, range(2, 3)),  # the scheduler took less than was offered
            (32, 0, range(2, 2)),
        ],
    )
    def test_range(self, num_local: int, num_external: int, positions: range) -> None:
        assert load_range(num_local, num_external, 16) == positions

    @given(resident=COUNTS, local_blocks=COUNTS, num_tokens=COUNTS, block_size=BLOCK_SIZES)
    @thorough(200)
    def test_what_is_offered_is_what_is_loaded(
        self, resident: int, local_blocks: int, num_tokens: int, block_size: int
    ) -> None:
        num_local = min(local_blocks, num_tokens // block_size) * block_size
        offer = loadable_tokens(resident, num_local, num_tokens, block_size)
        positions = load_range(num_local, offer, block_size)
        assert len(positions) * block_size == offer
        assert not positions or positions.start * block_size == num_local


@given(num_gpu_blocks=st.integers(2, 1 << 20), num_held=st.integers(0, 1 << 20), is_patient=st.booleans())
def test_stores_in_flight_leave_half_of_the_gpu_or_nearly_all(
    num_gpu_blocks: int, num_held: int, is_patient: bool
) -> None:
    """One block may always be stored, or a small cache would never be."""
    most = max(1, num_gpu_blocks // (2 if is_patient else 16))
    assert holdable_blocks(num_gpu_blocks, num_held, is_patient=is_patient) == max(0, most - num_held)


class TestLoadParts:
    def test_parts_double(self) -> None:
        assert load_parts(100, 16) == [(0, 16), (16, 32), (32, 64), (64, 100)]
        assert load_parts(16, 16) == [(0, 16)]
        assert load_parts(3, 16) == [(0, 3)]
        assert load_parts(0, 16) == []

    @given(num_blocks=st.integers(1, 1 << 20), first=st.integers(1, 5000))
    def test_whoever_shares_a_beginning_waits_for_twice_of_it_at_most(
        self, num_blocks: int, first: int
    ) -> None:
        parts = load_parts(num_blocks, first)
        assert parts[0][0] == 0 and parts[-1][1] == num_blocks
        assert all(stop == start for (_, stop), (start, _) in pairwise(parts))
        assert all(start < stop <= max(2 * start, first) for start, stop in parts)
        assert len(parts) <= 22

    @pytest.mark.parametrize(("block_bytes", "blocks"), [(2 << 20, 16), (64 << 10, 256), (1, 16 << 20)])
    def test_the_first_part_takes_about_a_millisecond(self, block_bytes: int, blocks: int) -> None:
        assert first_part_blocks(block_bytes) == blocks


@pytest.mark.parametrize(
    ("num_stuck", "num_blocks", "may"),
    [(0, 1, True), (0, 99, True), (1, 49, True), (1, 50, False), (49, 1, True), (50, 1, False)],
)
def test_loads_tried_beside_stuck_ones_leave_half_of_the_gpu(
    num_stuck: int, num_blocks: int, may: bool
) -> None:
    assert may_load(100, num_stuck, num_blocks) is may


@pytest.mark.parametrize("num_blocks", [1, 3, 20, 50])
def test_loads_that_get_stuck_one_after_the_other_never_hold_more_than_half(num_blocks: int) -> None:
    """But for the first, which begins whatever it takes."""
    num_stuck = num_blocks
    for _ in range(100):
        num_stuck += num_blocks * may_load(100, num_stuck, num_blocks)
    assert 50 - num_blocks < num_stuck <= 50


def test_what_is_computed_beyond_known_tokens_is_not_storable() -> None:
    """Drafts, and tokens that are not sampled yet."""
    assert storable_blocks(40, 23, 9, 4) == 5


def test_the_next_look_at_an_answer_is_when_its_run_is_full() -> None:
    assert tokens_to_next_look(33, 8, 8, 3, 4) == 11
