"""What the GPU has lost may leave the pool's tree at any time: nobody goes by what was there before."""

from typing import Any, ClassVar

import numpy as np
import pytest

from offload.config import StoreWhen
from offload.testing.memory_engine import MemoryRequest
from tests.offload.scheduler.serving import BLOCK, Serving, Sizes


def serve(serving: Serving, prompt: list[int]) -> MemoryRequest:
    request = serving.send(prompt, [1])
    serving.drain()
    return request


def test_who_begins_keeps_what_is_behind_what_the_gpu_has_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks were evicted without a copy and computed anew by another request, so the GPU has them again."""
    serving = Serving(Sizes(num_blocks=300, num_slots=600, store=StoreWhen.LAZY, step_tokens=8 * BLOCK))
    engine, side, prompt, number = serving.engine, serving.side, list(range(281)), 1000
    chain = serve(serving, prompt).block_hashes[:140]
    while engine.has(chain[-1]):
        serve(serving, list(range(number, number := number + 17)))
    monkeypatch.setattr(side.allocator.hollow, "plan", lambda *args: None)  # no more of it is admitted
    border = int(side.allocator.hollow.lacking(chain, 0, 140).sum())
    assert 4 < border < 130 and side.allocator.usable_depth(chain, 140, border) == 140
    while engine.has(chain[border]):
        serve(serving, [number := number + 1])
    for prefix_hash in chain[border - 4 : border]:
        engine._forget(engine._cached[prefix_hash])
    later = side.stores.later
    assert later is not None
    left = later._left  # it is up to the order which of them one look finds
    monkeypatch.setattr(
        later, "_look_back", lambda: [*map(left.refresh, [*left.line.values(), *left.due.values()])]
    )
    monkeypatch.setattr(later, "_take_turns", lambda *args, **named: None)  # nothing to wait for
    request = serving.send(prompt[: (border + 5) * BLOCK + 1], [1])
    assert side.offer(request, border * BLOCK).tokens == 5 * BLOCK
    assert engine.give(request, (border + 5) * BLOCK)
    side.allocated(request, 5 * BLOCK)
    assert len(side.restores.left_over()["restores"]) == 1  # type: ignore[arg-type]


def test_no_store_begins_before_its_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is before them may leave the pool while room is made for them."""
    serving = Serving(Sizes(num_blocks=100, num_slots=200, store=StoreWhen.LAZY))
    chain = serve(serving, list(range(25))).block_hashes[:12]
    allocator, stores = serving.side.allocator, serving.side.stores
    later = stores.later
    assert later is not None
    later._take_turn(next(iter(later._left.line.values())))
    allocator.drop(chain, 6)
    stores.holds.release(stores.backlog.take(6), None)
    monkeypatch.setattr(later, "make_room", lambda *args: allocator.drop(chain, 3))
    assert stores.ended.store() == [] and not stores.backlog.num_queued
    assert allocator.known_depth(chain, 12) == 3
    serving.drain()


class Watched(np.ndarray[Any, Any]):
    """How many elements are taken of it at once. What always lets go of the interpreter's lock is refused."""

    taken: ClassVar[list[int]] = []

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)
        self.taken.append(np.size(found))
        return found

    def argmax(self, *args: Any, **named: Any) -> Any:
        raise AssertionError("others may go first")

    sort = argmax  # of ``np.unique``, too


def test_a_step_looks_at_what_is_due_without_letting_others_go_first() -> None:
    """NumPy lets go of the interpreter's lock from 500 elements on."""
    serving = Serving(Sizes(num_blocks=1500, num_slots=3000, store=StoreWhen.LAZY, step_tokens=8 * BLOCK))
    serve(serving, list(range(700 * BLOCK + 1)))
    later = serving.side.stores.later
    assert later is not None
    later._take_turn(next(iter(later._left.line.values())))
    serving.drain()
    assert later._left.num_due == 700
    later._left._owners = later._left._owners.view(Watched)
    later.step(0)
    assert not Watched.taken, "nothing has changed since the last step"
    later.step(1)
    assert 0 < max(Watched.taken) <= 500


def test_a_window_that_one_step_does_not_fill_is_filled_by_the_next_ones(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Though nobody comes or goes, and nothing is held: all that wait for their turn have copies already."""
    serving = Serving(Sizes(num_blocks=120, num_slots=400, store=StoreWhen.LAZY, step_tokens=8 * BLOCK))
    prompts = [list(range(first, first + BLOCK + 1)) for first in range(0, 130 * BLOCK, BLOCK)]
    later = serving.side.stores.later
    assert later is not None
    for prompt in prompts:
        serve(serving, prompt)
    for prompt in prompts[-100:]:
        serve(serving, prompt)
        later._take_turn(next(reversed(later._left.line.values())))
        serving.drain()
        serve(serving, prompt)  # it is the last in the line again
    left, num_in_line = later._left, len(later._left.line)
    assert num_in_line > 3 and not later._num_held
    monkeypatch.setattr("offload.scheduler.later._LOOKED_AT", 1)
    for number in range(1, 4):
        later.step(120)  # its window has more than there are
        assert len(left.line) == num_in_line - number
    while left.line:
        later.step(120)
    assert not later._num_held
