"""What all ranks have kept alike, and the chains that it makes up."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.messages import TierFacts
from offload.naming import ROOT, rows
from offload.scheduler.tiers.recovery import Agreed, agree, chains
from tests.offload.scheduler.tiers.facts import SLOTS, Told, facts, name

A, B, C, D = (name(label) for label in "ABCD")


def agreed_places(*all_facts: TierFacts, num_places: int = 8) -> list[int]:
    return agree(all_facts, num_places).places.tolist()


def agreed_of(*told: Told) -> Agreed:
    """As if all ranks had told that."""
    return agree([facts(told, num_places=99)], 99)


def found(*told: Told) -> list[tuple[list[bytes], list[int]]]:
    """Names and places of each chain."""
    agreed = agreed_of(*told)
    found = chains(agreed)
    all_places = dict(zip(map(bytes, found.extents.names), found.extents.places.tolist(), strict=True))
    return [(names, [all_places[each] for each in names]) for names in found.names()]


# What ranks agree on


def test_what_both_have_is_found_the_oldest_first() -> None:
    told = [Told(5, 9, B, A), Told(2, 11, C), Told(7, 4, A)]
    agreed = agree([facts(told), facts(reversed(told))], 8)
    assert agreed.places.tolist() == [7, 5, 2]
    assert agreed.generations.tolist() == [4, 9, 11]
    assert np.array_equal(agreed.names, rows([A, B, C]))
    assert np.array_equal(agreed.parents, rows([ROOT, A, ROOT]))


@pytest.mark.parametrize(
    "theirs",
    [
        None,
        Told(3, 8, A, B),
        Told(3, 7, C, B),
        Told(3, 7, A, C),
        Told(4, 7, A, B),
        Told(3, 7, A, B, num_slots=SLOTS - 1),
        Told(3, 7, A, B, suffix=b"v"),
    ],
    ids=["nothing", "generation", "name", "parent", "place", "slots", "suffix"],
)
@pytest.mark.parametrize("is_first", [False, True])
def test_what_one_rank_has_otherwise_is_not_found(theirs: Told | None, is_first: bool) -> None:
    mine, other = Told(3, 7, A, B), Told(6, 5, D)
    ours = facts([mine, other])
    others = facts([other] if theirs is None else [theirs, other])
    ranks = [others, ours, ours] if is_first else [ours, ours, others]
    assert agreed_places(*ranks) == [6]


def test_ranks_that_share_bytes_each_tell_of_their_places() -> None:
    first = facts([Told(0, 3, A), Told(4, 5, C, B)], num_parts=2)
    second = facts([Told(3, 4, B, A)], part=1, num_parts=2)
    assert agreed_places(first, second) == [0, 3, 4]


def test_what_a_rank_tells_of_others_places_is_not_heard() -> None:
    first = facts([Told(0, 3, A), Told(1, 9, D)], num_parts=2)
    second = facts([], part=1, num_parts=2)
    assert agreed_places(first, second) == [0]


def test_a_part_that_several_stages_have_must_be_the_same_on_each() -> None:
    """Two stages of two replicas: a place is of one rank of each stage."""
    stages = [
        [facts([Told(0, 3, A), Told(2, 4, B)], num_parts=2), facts([Told(1, 5, C)], part=1, num_parts=2)],
        [facts([Told(0, 3, A)], num_parts=2), facts([Told(1, 5, C)], part=1, num_parts=2)],
    ]
    assert agreed_places(*stages[0], *stages[1]) == [0, 1]


def test_places_that_not_all_ranks_have_are_not_heard() -> None:
    """A rank's slab is smaller than before."""
    large, small = facts([Told(1, 3, A), Told(9, 4, B)], num_places=12), facts([Told(1, 3, A)], num_places=4)
    assert agreed_places(large, small, num_places=4) == [1]


def test_nothing_is_agreed_on_where_nobody_has_anything() -> None:
    agreed = agree([facts([]), facts([])], 8)
    assert not len(agreed.places) and agreed.names.shape == (0, 32)
    assert list(chains(agreed).names()) == []


# Chains


def test_a_chain_from_its_first_to_its_last() -> None:
    assert found(Told(5, 3, C, B), Told(1, 1, A), Told(8, 2, B, A)) == [([A, B, C], [1, 8, 5])]


def test_chains_that_part() -> None:
    told = [Told(1, 1, A), Told(2, 2, B, A), Told(3, 3, C, B), Told(4, 4, D, A)]
    assert found(*told) == [([A, B, C], [1, 2, 3]), ([A, D], [1, 4])]


def test_what_was_written_first_comes_first() -> None:
    assert found(Told(1, 9, A), Told(2, 3, B)) == [([B], [2]), ([A], [1])]


@pytest.mark.parametrize("hole", [0, 1])
def test_what_comes_after_a_hole_is_left_out(hole: int) -> None:
    told = [Told(1, 1, A), Told(2, 2, B, A), Told(3, 3, C, B), Told(4, 4, D)]
    del told[hole]
    whole = {name for names, _ in found(*told) for name in names}
    assert whole >= {D} and C not in whole


def test_a_chain_ends_before_a_hole() -> None:
    """B is gone: A is the end of nothing that is known, and begins a chain of itself."""
    assert found(Told(1, 1, A), Told(3, 3, C, B)) == [([A], [1])]


def test_orphans_are_left_out() -> None:
    assert found(Told(1, 1, B, A), Told(2, 2, C, B)) == []


@pytest.mark.timeout(10)
def test_loops_are_left_out() -> None:
    """No engine writes them; a file that was tampered with must not hang one."""
    assert found(Told(1, 1, A, A), Told(2, 2, B, C), Told(3, 3, C, B), Told(4, 4, D, C)) == []


def test_of_one_name_the_newest_counts() -> None:
    assert found(Told(1, 5, A), Told(2, 3, A), Told(3, 4, B, A)) == [([A, B], [1, 3])]


@given(st.data())
def test_any_records_make_chains(data: st.DataObject) -> None:
    """Whatever lies there: chains begin at the root, follow parents, and name places of theirs."""
    labels = [name(label) for label in "ABCDEF"]
    drawn = st.builds(
        Told,
        st.integers(0, 11),
        st.integers(1, 20),
        st.sampled_from(labels),
        st.sampled_from([ROOT, ROOT, *labels]),
        st.just(SLOTS),
        st.just(b""),
    )
    told = data.draw(st.lists(drawn, max_size=12, unique_by=lambda each: each.place))
    newest: dict[bytes, Told] = {}
    for each in sorted(told, key=lambda each: each.generation):
        newest[each.name] = each
    seen = set()
    for names, places in found(*told):
        assert len(set(names)) == len(names) == len(places)
        for parent, label, place in zip([ROOT, *names], names, places, strict=False):
            generations = [each.generation for each in told if each.name == label]
            [is_it] = [each for each in told if each.place == place]
            assert (is_it.name, is_it.generation) == (label, max(generations))
            assert parent in {each.parent for each in told if each.name == label}
        seen.update(names)
    assert seen <= newest.keys()
