"""A pool that outlives its engine: what workers are told of its slots."""

import numpy as np

from allocator import StorePlan
from offload.messages import NAME_BYTES, Ids, Kept
from offload.naming import BAG, ROOT, WIDTH_SHIFT, rows
from offload.scheduler.engine import Request
from offload.scheduler.tiers.names import names_of


class Lasting:
    """Tells workers what slots hold once a store has been committed.

    Until then it may turn out that the GPU's blocks were no KV, so nothing is said before. After a reset
    nothing more is said: what the pool holds then is of weights that the next life may not have.
    """

    def __init__(self) -> None:
        """There is nothing to tell yet."""
        self._is_over = False
        self._news: list[Kept] = []

    @property
    def has_news(self) -> bool:
        """Whether workers are yet to be told."""
        return bool(self._news)

    def is_meant(self, request: Request) -> bool:
        """Whether what is stored of it may outlive the engine: hashes have names of adapters, not weights."""
        return request.lora_request is None and not self._is_over

    def committed(self, plan: StorePlan, generations: Ids) -> None:
        """Slots of that plan hold what it says, on all ranks; ``generations``: of ``plan.all_slots``."""
        if self._is_over or not len(generations):
            return
        self._news.append(_described(plan, generations))

    def take(self) -> list[Kept]:
        """What there is to tell."""
        news, self._news = self._news, []
        return news

    def reset(self) -> None:
        """Weights may have changed. What has been committed before is right, and is still told."""
        self._is_over = True


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
