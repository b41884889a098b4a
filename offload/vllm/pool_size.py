"""How large the pool is, of all ranks together."""

from collections.abc import Collection
from typing import NamedTuple

from offload.messages import WorkerFacts


class PoolSize(NamedTuple):
    """Of all ranks together.

    Attributes:
        num_slots: the least that any rank has.
        slot_bytes: bytes of a slot on all ranks, of which those count once that share it.
        block_bytes: bytes of a GPU block on all ranks.
        most_slots: the least that any rank may have later; as many as now if one may not have more.
        unit_slots: of which all ranks can give the memory back; 0: one of them cannot.
    """

    num_slots: int
    slot_bytes: int
    block_bytes: int
    most_slots: int = 0
    unit_slots: int = 0

    @classmethod
    def of(cls, facts: Collection[WorkerFacts], num_ranks: int) -> "PoolSize":
        """What ``num_ranks`` have together.

        A handshake knows ranks of prefill context parallelism by one name. They have the same layers, so the
        one that is heard of speaks for them all.
        """
        slot_bytes = sum(fact.slot_bytes / fact.num_sharing for fact in facts)
        block_bytes = sum(fact.slot_bytes for fact in facts)
        num_slots = min(fact.num_slots for fact in facts)
        unit_slots = max(fact.unit_slots for fact in facts) if all(fact.unit_slots for fact in facts) else 0
        unit_slots *= unit_slots < num_slots
        most_slots = min(fact.most_slots or fact.num_slots for fact in facts)
        # Ranks count whole units where they may have more later. Where one may not, none of them is to grow,
        # and the last unit need not be whole.
        may_grow = unit_slots > 0 and all(fact.most_slots > fact.num_slots for fact in facts)
        return cls(
            num_slots,
            round(slot_bytes * num_ranks / len(facts)),
            block_bytes * num_ranks // len(facts),
            most_slots if may_grow else num_slots,
            unit_slots,
        )
