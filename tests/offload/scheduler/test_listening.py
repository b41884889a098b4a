"""What workers are told of a pool that peers read: rows as stores commit, and which life they are of."""

from allocator import hash_chain
from offload.messages import NAMED, PRIVATE, SUFFIX_BYTES, Kept, Listening, StepPlan
from offload.naming import rows
from offload.scheduler.tiers.names import names_of
from offload.scheduler.weights import suffix_of
from tests.offload.scheduler.serving import BLOCK, Serving, Sizes

PEER = b"12345678"


def serving(peer: bytes | None = PEER) -> Serving:
    made = Serving(Sizes(num_slots=64, peer=peer))
    made.side.allocator.check_invariants()
    return made


def run(made: Serving, num_steps: int = 1) -> list[StepPlan]:
    """Plans of steps in which all copies end."""
    plans = []
    for _ in range(num_steps):
        plans.append(made.step())
        made.ranks.end_all()
    return plans


def lives(plans: list[StepPlan]) -> list[Listening]:
    return [plan.listening for plan in plans if plan.listening is not None]


def names(kept: list[Kept]) -> set[bytes]:
    return {name.tobytes() for each in kept for name in each.names}


def test_an_engine_that_nobody_asks_tells_nothing() -> None:
    made = serving(None)
    made.send(range(8), [7])
    assert all(not plan.kept and plan.listening is None for plan in run(made, 5))
    made.reset()
    assert all(plan.listening is None for plan in run(made, 2))


def test_the_first_plan_says_which_life_it_is_and_no_other_repeats_it() -> None:
    made = serving()
    assert made.side.has_pending_work  # an idle engine makes the step that tells it
    plans = run(made, 3)
    [life] = lives(plans)
    assert plans[0].listening == life
    assert life.peer == PEER and life.suffix == b"" and len(life.epoch) == 8
    assert not made.side.has_pending_work


def test_each_start_is_another_life() -> None:
    epochs = {each.epoch for _ in range(20) for each in lives(run(serving()))}
    assert len(epochs) == 20


def test_what_is_committed_is_told_chunk_by_chunk() -> None:
    made = Serving(Sizes(peer=PEER, step_tokens=4))
    prompt = list(range(12))
    made.send(prompt, [7, 8])
    chain = names_of(hash_chain(prompt, BLOCK))
    told: list[set[bytes]] = []
    for plan in run(made, 9):
        for each in plan.kept:
            told.append(names([each]))
            assert (made.side.stores._common.filled_by[each.slots] == each.generations).all()
    assert told == [set(chain[:2]), set(chain[2:4]), set(chain[4:])]


def test_parents_lead_from_each_position_to_the_one_before() -> None:
    made = serving()
    prompt = list(range(8))
    made.send(prompt, [7])
    [kept] = [each for plan in run(made, 4) for each in plan.kept]
    chain = names_of(hash_chain(prompt, BLOCK))
    assert kept.names.tolist() == rows(chain).tolist()
    assert kept.parents.tolist() == rows([bytes(32), *chain[:-1]]).tolist()


def test_a_reset_begins_another_life_which_nobody_can_ask_for() -> None:
    made = serving()
    made.send(range(8), [7])
    run(made)
    made.step()  # the store has been committed, and is yet to be told
    assert made.side._lasting is not None and made.side._lasting.has_news
    made.reset()
    plans = run(made, 3)
    [life] = lives(plans)
    assert plans[0].listening == life and life.suffix[:1] == PRIVATE and len(life.suffix) == SUFFIX_BYTES
    assert not any(plan.kept for plan in plans)  # of the life before
    made.send(range(8), [7])
    assert any(plan.kept for plan in run(made, 4))  # of this one
    made.reset()
    [other] = lives(run(made, 2))
    assert other.suffix != life.suffix and other.epoch != life.epoch


def test_weights_with_a_name_begin_a_life_that_others_with_it_can_ask_for() -> None:
    made = serving()
    run(made)
    made.reset()
    run(made)
    made.side.weights.name("step 5")
    made.send(range(8), [7])
    plans = run(made, 5)
    [life] = lives(plans)
    assert life.suffix == suffix_of("step 5") and life.suffix[:1] == NAMED
    assert any(plan.kept for plan in plans)


def test_what_adapters_changed_is_told_to_nobody() -> None:
    made = serving()
    made.send(
        range(8), [7], lora=type("Lora", (), {"lora_name": "a", "lora_int_id": 1, "load_inplace": False})
    )
    assert not any(plan.kept for plan in run(made, 5))
