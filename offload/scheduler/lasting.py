"""A pool that others read, later engines or peers: what workers are told of its slots."""

import os
from collections.abc import Callable

import numpy as np

from allocator import StorePlan
from offload.messages import (
    MOST_REFUSED,
    NAME_BYTES,
    PRIVATE,
    SUFFIX_BYTES,
    Ids,
    Kept,
    Listening,
    StepPlan,
    Verdict,
)
from offload.naming import BAG, ROOT, WIDTH_SHIFT, rows
from offload.scheduler.engine import Request
from offload.scheduler.tiers.names import names_of

EPOCH_BYTES = 8


class Lasting:
    """Tells workers what slots hold once a store has been committed.

    Until then it may turn out that the GPU's blocks were no KV, so nothing is said before. In a pool that
    outlives its engine nothing more is said after a reset: what it holds then is of weights that the next
    life may not have. Peers of any other one are told of another life, and what it holds from then on.
    """

    def __init__(
        self,
        peer: bytes | None = None,
        *,
        outlives: bool = True,
        draw: Callable[[int], bytes] = os.urandom,
    ) -> None:
        """There is nothing to tell yet but that peers may read.

        Args:
            peer: by which they know this engine; None: nobody listens.
            outlives: whether later engines read the pool, too.
            draw: so many random bytes.
        """
        self._peer = peer
        self._outlives = outlives
        self._draw = draw
        self._is_over = False
        self._news: list[Kept] = []
        self._verdicts: list[Verdict] = []
        self._refused: dict[bytes, None] = {}  # the latest ones
        self.life: Listening | None = None
        """The one that peers may read now."""
        self._is_new = False
        self._begin(b"")

    @property
    def has_news(self) -> bool:
        """Whether workers are yet to be told."""
        return bool(self._news or self._verdicts) or self._is_new

    def is_meant(self, request: Request) -> bool:
        """Whether what is stored of it may outlive the engine: hashes have names of adapters, not weights."""
        return request.lora_request is None and not self._is_over

    def committed(self, plan: StorePlan, generations: Ids) -> None:
        """Slots of that plan hold what it says, on all ranks; ``generations``: of ``plan.all_slots``."""
        if self._is_over or not len(generations):
            return
        self._news.append(_described(plan, generations))

    def refuse(self, name: bytes) -> None:
        """The prompt with that last name is not handed off: no peer need wait for it."""
        if self._peer is None:
            return
        self._refused.pop(name, None)
        self._refused[name] = None
        if len(self._refused) > MOST_REFUSED:
            del self._refused[next(iter(self._refused))]
        self._verdicts.append(Verdict(name, True))

    def expect(self, name: bytes) -> None:
        """The same prompt has begun again, and may be handed off."""
        if name in self._refused:
            del self._refused[name]
            self._verdicts.append(Verdict(name, False))

    def tell(self, plan: StepPlan) -> None:
        """Put into a plan all that there is to tell."""
        plan.kept, plan.listening = self.take(), self.take_life()
        plan.verdicts, self._verdicts = self._verdicts, []

    def take(self) -> list[Kept]:
        """What there is to tell."""
        news, self._news = self._news, []
        return news

    def take_life(self) -> Listening | None:
        """The life that peers may read, once for each."""
        is_new, self._is_new = self._is_new, False
        return self.life if is_new else None

    def reset(self) -> None:
        """Weights may have changed. What has been committed before is right for later engines only."""
        self._is_over = self._outlives
        if self._peer is not None:
            self._news.clear()  # or it would be told as of the new life
            self._begin(PRIVATE + self._draw(SUFFIX_BYTES - 1))

    def name_weights(self, suffix: bytes) -> None:
        """Weights since the last reset have a name, and nothing was computed since."""
        if not self._outlives:
            self._begin(suffix)

    def _begin(self, suffix: bytes) -> None:
        if self._peer is not None:
            self._verdicts, self._refused = [], {}
            self.life = Listening(self._peer, self._draw(EPOCH_BYTES), suffix)
            self._is_new = True


def _described(plan: StorePlan, generations: Ids) -> Kept:
    positions, num_bag = len(plan.hashes), 0 if plan.bag is None else len(plan.bag)
    columns = plan.slots.shape[1] if positions else 1
    hashes = names_of(plan.hashes)
    before = names_of(plan.lead[-1:]) or [ROOT]
    names, parents = rows(hashes), rows([*before, *hashes[:-1]][:positions])
    width = len((plan.hashes or plan.lead)[-1])
    marks: Ids = np.tile(np.arange(columns, dtype=np.int64), positions)
    if columns != 1:
        names, parents = names.repeat(columns, axis=0), parents.repeat(columns, axis=0)
    if num_bag:
        last = rows((hashes or before)[-1:])
        names = np.concatenate([names, last.repeat(num_bag, axis=0)])
        parents = np.concatenate([parents, np.zeros((num_bag, NAME_BYTES), dtype=np.uint8)])
        marks = np.concatenate([marks, np.arange(num_bag) | BAG])
    return Kept(plan.all_slots, generations, names, parents, marks | width << WIDTH_SHIFT)
