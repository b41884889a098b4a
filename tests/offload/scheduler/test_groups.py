"""Which blocks belong to a position, and which to a checkpoint."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.scheduler.groups import HOLE, Group, Groups, Kind

FULL = Group(Kind.FULL, 4)
WINDOW = Group(Kind.WINDOW, 4, span=9)  # a window of 10 tokens
CHUNK = Group(Kind.CHUNK, 4, span=16)
STATE = Group(Kind.STATE, 4)


def read(group: Group, num_tokens: int) -> set[int]:
    """Tokens before that the next one reads, or for states the last one."""
    match group.kind:
        case Kind.FULL:
            return set(range(num_tokens))
        case Kind.WINDOW:
            return set(range(max(0, num_tokens - group.span), num_tokens))
        case Kind.CHUNK:
            return {each for each in range(num_tokens) if each // group.span == num_tokens // group.span}
        case Kind.STATE:
            return {num_tokens - 1}


@given(
    kind=st.sampled_from(Kind),
    block_size=st.integers(1, 6),
    span=st.integers(1, 30),
    num_blocks=st.integers(1, 20),
)
def test_what_is_needed_is_the_blocks_of_what_the_next_token_reads(
    kind: Kind, block_size: int, span: int, num_blocks: int
) -> None:
    group = Group(kind, block_size, span)
    num_tokens = num_blocks * block_size
    needed = group.needed(num_tokens)
    assert set(needed) == {token // block_size for token in read(group, num_tokens)}
    assert needed.stop <= num_blocks
    assert kind is Kind.FULL or len(needed) <= group.most


@pytest.mark.parametrize("kind", [Kind.WINDOW, Kind.CHUNK, Kind.STATE])
@pytest.mark.parametrize("span", [1, 2, 7, 8, 9, 16])
def test_a_bag_is_no_larger_than_it_may_have_to_be(kind: Kind, span: int) -> None:
    group = Group(kind, 4, span)
    assert group.most == max(len(group.needed(num_tokens)) for num_tokens in range(4, 400, 4))


def tables(groups: list[Group], num_tokens: int) -> list[list[str]]:
    """Blocks with a name each."""
    return [
        [f"{number}:{index}" for index in range(-(-num_tokens // group.block_size))]
        for number, group in enumerate(groups)
    ]


class TestPrefix:
    def test_of_one_group_it_is_a_part_of_the_table(self) -> None:
        groups = Groups([FULL], 4)
        assert groups.is_plain
        assert (groups.columns, groups.bag_slots, groups.spacing) == (1, 0, 0)
        assert groups.prefix(tables([FULL], 20), range(1, 3)) == ["0:1", "0:2"]

    def test_of_several_it_is_row_by_row(self) -> None:
        each = [FULL, WINDOW, Group(Kind.FULL, 8)]
        groups = Groups(each, 8)
        assert not groups.is_plain
        assert groups.columns == 3
        assert groups.prefix(tables(each, 40), range(1, 3)) == ["0:2", "0:3", "2:1", "0:4", "0:5", "2:2"]
        assert groups.num_positions(tables(each, 39)) == 5

    def test_without_full_attention_there_is_none(self) -> None:
        groups = Groups([WINDOW, STATE], 4)
        assert groups.columns == 0
        assert groups.prefix(tables([WINDOW, STATE], 20), range(5)) == []
        assert groups.spacing > 0

    def test_tokens_of_a_pool(self) -> None:
        assert Groups([FULL], 4).tokens_in(10) == 40
        assert Groups([FULL, Group(Kind.FULL, 8), WINDOW], 8).tokens_in(10) == 24
        assert Groups([WINDOW], 4).tokens_in(10) == 12

    def test_tables_that_are_too_short_are_noticed(self) -> None:
        each = [FULL, Group(Kind.FULL, 8)]
        with pytest.raises(ValueError, match="shorter"):
            Groups(each, 8).prefix([["a", "b", "c", "d"], ["e"]], range(2))


class TestBag:
    groups = Groups([FULL, WINDOW, CHUNK, STATE], 4)
    tables = tables([FULL, WINDOW, CHUNK, STATE], 48)

    def test_it_has_what_each_group_needs(self) -> None:
        bag = self.groups.bag(self.tables, 10, {}, is_standing=True)  # 40 tokens
        assert bag == ["1:7", "1:8", "1:9", "2:8", "2:9", "3:9"]
        assert self.groups.num_in_bag(10) == len(bag)
        assert self.groups.bag_slots >= len(bag)

    def test_a_chunk_that_has_just_ended_needs_nothing(self) -> None:
        assert self.groups.bag(self.tables, 8, {}, is_standing=True) == ["1:5", "1:6", "1:7", "3:7"]

    def test_a_state_is_where_the_engine_says(self) -> None:
        assert self.groups.bag(self.tables, 8, {3: "other"}, is_standing=False)[-1] == "other"

    def test_a_state_that_no_step_ends_with_is_lacking(self) -> None:
        assert len(self.groups.bag(self.tables, 8, {}, is_standing=False)) < self.groups.num_in_bag(8)

    def test_a_state_that_moves_is_taken_from_nowhere(self) -> None:
        moving = Groups([FULL, STATE._replace(moves=True)], 4)
        assert moving.bag(self.tables, 8, {}, is_standing=True) == []

    def test_what_is_missing_begins_behind_what_is_there(self) -> None:
        """A request that has 32 tokens lacks all of the bag but what its window still has of them."""
        missing = list(self.groups.missing(self.tables, 8, 10))
        assert missing == [
            (["1:8", "1:9"], 0, range(1, 3)),
            (["2:8", "2:9"], 0, range(3, 5)),
            (["3:8", "3:9"], 1, range(5, 6)),
        ]

    def test_a_request_that_has_nothing_lacks_the_whole_bag(self) -> None:
        entries = [entry for _, _, entries in self.groups.missing(self.tables, 0, 10) for entry in entries]
        assert entries == list(range(self.groups.num_in_bag(10)))
        assert [num_holes for _, num_holes, _ in self.groups.missing(self.tables, 0, 10)] == [7, 8, 9]


def test_a_hole_is_the_block_that_is_never_given_out() -> None:
    assert HOLE == 0
