"""Prompts that are remembered, beside a plain list of them."""

from hypothesis import given
from hypothesis import strategies as st

from offload.scheduler.engine import Origin
from offload.scheduler.why.note import Note
from offload.scheduler.why.prompts import Found, Prompts


def chain_of(path: list[int]) -> list[bytes]:
    """Names of positions that depend on all before them."""
    return [bytes(path[: index + 1]) for index in range(len(path))]


CHAINS = st.lists(st.integers(0, 1), min_size=1, max_size=9).map(chain_of)


def slowly(notes: list[Note], chain: list[bytes], position: int) -> Found:
    kept = [note for note in reversed(notes) if note.chain is not None]
    sharers = [note for note in kept if chain[position] in (note.chain or ())]
    before = [note for note in kept if position and chain[position - 1] in (note.chain or ())]
    return Found(sharers[0] if sharers else None, None if sharers or not before else before[0])


@given(st.lists(CHAINS, min_size=1, max_size=7), CHAINS, st.data())
def test_who_had_the_same(chains: list[list[bytes]], chain: list[bytes], data: st.DataObject) -> None:
    """Of so few, all are known."""
    prompts, notes = Prompts(), []
    for number, each in enumerate(chains):
        notes.append(Note(f"r{number}", 0.0, 0))
        prompts.add(notes[-1], each)
        prompts.check_invariants()
    position = data.draw(st.integers(0, len(chain) - 1))
    found, wanted = prompts.find(chain, position), slowly(notes, chain, position)
    if found.sharer is None:
        assert wanted.sharer is None
    assert found.sharer is None or chain[position] in (found.sharer.chain or ())
    if found.sharer is None and found.neighbour is not None:
        assert chain[position - 1] in (found.neighbour.chain or ())
    assert (found.sharer or found.neighbour is None) or wanted.neighbour is not None


@given(st.lists(CHAINS, min_size=1, max_size=40), st.integers(1, 30))
def test_the_oldest_are_forgotten(chains: list[list[bytes]], most: int) -> None:
    prompts, notes = Prompts(most), []
    for number, each in enumerate(chains):
        notes.append(Note(f"r{number}", 0.0, 0))
        prompts.add(notes[-1], each)
        prompts.check_invariants()
    kept = [note.chain is not None for note in notes]
    assert kept == sorted(kept), "what came later is kept"
    assert sum(len(note.chain or ()) for note in notes) <= most


def test_a_chain_that_has_grown_is_found_where_it_has_grown() -> None:
    prompts, note, chain = Prompts(), Note("r0", 0.0, 0), chain_of([1] * 20)
    grows = chain[:3]
    prompts.add(note, grows)
    grows += chain[3:]
    prompts.charge(note)
    for position in range(20):
        assert prompts.find(chain, position).sharer is note
    prompts.check_invariants()


def test_short_prompts_are_bounded_too() -> None:
    """Those without a full block have no positions, and are not remembered for ever."""
    prompts = Prompts(100, 3)
    for number in range(5):
        prompts.add(Note(f"r{number}", 0.0, 0, origin=Origin(number, 0, "")), [])
        prompts.check_invariants()
    assert [prompts.same_tokens(Origin(each, 0, "")) is not None for each in range(5)] == [False] * 2 + [
        True
    ] * 3


def test_what_is_forgotten_is_not_found() -> None:
    prompts, chain = Prompts(100, 1), chain_of([1] * 20)
    prompts.add(Note("r0", 0.0, 0), chain)
    prompts.add(Note("r1", 0.0, 0), chain_of([0]))
    assert prompts.find(chain, 9) == Found(None, None)
    prompts.check_invariants()


def test_a_chain_that_the_engine_rewrites_is_forgotten_all_the_same() -> None:
    """As that of a session, whose last answer leaves it."""
    prompts, note, chain = Prompts(30), Note("r0", 0.0, 0), chain_of([1] * 20)
    prompts.add(note, chain)
    del chain[2:]
    prompts.charge(note)
    prompts.check_invariants()
    chain += chain_of([1, 1, *[0] * 6])[2:]
    prompts.charge(note)
    prompts.add(Note("r1", 0.0, 0), chain_of([0] * 29))
    assert note.chain is None
    prompts.check_invariants()
