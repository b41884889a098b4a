"""What is made mutants of, and which of our tests are to notice them."""

from typing import NamedTuple


class Area(NamedTuple):
    """Attributes:
    sources: modules.
    tests: files whose tests may notice a mutant, the quick ones first.
    """

    sources: list[str]
    tests: list[str]


AREAS = {
    "allocator": Area(
        [
            "allocator.block_allocator",
            "allocator.events",
            "allocator.prefix_tree",
            "allocator.index",
            "allocator.store_plans",
            "allocator.slot_pool",
            "allocator.in_flight",
            "allocator.ranking",
            "allocator.uncached",
            "allocator.node",
            "allocator.conservation",
            "allocator.giving_back",
            "allocator.node_table",
            "allocator.bags",
            "allocator.checkpoints",
            "allocator.resizing",
            "allocator.room",
            "allocator.shedding",
            "allocator.planning",
            "allocator.pins",
            "evictor.caller",
        ],
        [
            "tests/allocator/test_pins.py",
            "tests/allocator/test_stores.py",
            "tests/allocator/test_eviction.py",
            "tests/allocator/test_extremes.py",
            "tests/allocator/test_situations.py",
            "tests/allocator/test_slot_pool.py",
            "tests/allocator/test_resizing.py",
            "tests/allocator/test_shedding.py",
            "tests/allocator/test_uncached.py",
            "tests/allocator/test_joins.py",
            "tests/allocator/test_checkpoints.py",
            "tests/allocator/test_prefix_tree_machine.py",
            "tests/mutants/machines.py",
        ],
    ),
    "evictor": Area(
        [
            "evictor.hinted",
            "evictor.marks",
            "evictor.hints",
            "evictor.hazard",
            "evictor.ranked",
            "evictor.two_queues",
            "evictor.order",
            "evictor.reuse",
            "evictor.history",
            "evictor.arc",
            "evictor.ghosts",
            "evictor.gittins",
        ],
        [
            "tests/evictor/test_hinted.py",
            "tests/evictor/test_hinted_share.py",
            "tests/evictor/test_hazard.py",
            "tests/evictor/test_gittins.py",
            "tests/evictor/test_ages.py",
            "tests/evictor/test_lru.py",
            "tests/evictor/test_joins.py",
            "tests/evictor/test_weights.py",
            "tests/evictor/test_policy_contract.py",
            "tests/evictor/test_golden_hits.py",
            "tests/mutants/machines.py",
        ],
    ),
    "scheduler": Area(
        [
            "offload.scheduler.stores",
            "offload.scheduler.holds",
            "offload.scheduler.backlog",
            "offload.scheduler.restores",
            "offload.scheduler.side",
        ],
        [
            "tests/offload/scheduler/test_stores_machine.py",
            "tests/offload/scheduler/test_restores_machine.py",
            "tests/offload/scheduler/test_side_machine.py",
        ],
    ),
    "holds": Area(
        ["offload.scheduler.holds"],
        ["tests/virtual/test_slow_link.py", "tests/virtual/test_stored_whole.py"],
    ),
    "later": Area(
        [
            "offload.scheduler.later",
            "offload.scheduler.leavings",
            "offload.scheduler.given",
            "offload.scheduler.ended",
            "offload.vllm.engine",
        ],
        [
            "tests/virtual/test_hints.py",
            "tests/virtual/test_later.py",
            "tests/offload/scheduler/test_later_machine.py",
        ],
    ),
    "quiet": Area(
        ["offload.scheduler.quiet", "offload.scheduler.backlog", "offload.scheduler.lookout"],
        ["tests/offload/scheduler/test_lookout.py", "tests/virtual/test_quiet.py"],
    ),
    "hollow": Area(["allocator.hollow"], ["tests/allocator/test_hollow.py"]),
    "hybrid": Area(
        [
            "offload.scheduler.groups",
            "offload.scheduler.checkpoints",
            "offload.scheduler.hits",
            "offload.scheduler.waiting",
        ],
        [
            "tests/offload/scheduler/test_groups.py",
            "tests/offload/scheduler/test_checkpoints.py",
            "tests/offload/sizing/test_hybrids.py",
            "tests/virtual/test_checkpoints.py",
            "tests/virtual/test_short_of_blocks.py",
            "tests/virtual/test_hybrid.py",
            "tests/virtual/test_offers.py",
        ],
    ),
    "spelling": Area(
        [
            "allocator.events",
            "allocator.planning",
            "offload.scheduler.common",
            "offload.scheduler.spelling",
            "offload.scheduler.tiers.told",
            "offload.vllm.engine",
            "offload.vllm.kv_events",
        ],
        [
            "tests/offload/scheduler/test_spelling.py",
            "tests/offload/scheduler/tiers/test_told.py",
            "tests/virtual/test_event_tokens.py",
        ],
    ),
    "choices": Area(
        [
            "offload.scheduler.back_pressure",
            "offload.scheduler.choice",
            "offload.scheduler.choices",
            "offload.scheduler.costs",
            "offload.scheduler.queues",
        ],
        [
            "tests/offload/scheduler/test_choice.py",
            "tests/offload/scheduler/test_choices.py",
            "tests/offload/scheduler/test_costs.py",
            "tests/offload/scheduler/test_queues.py",
            "tests/offload/scheduler/test_back_pressure.py",
            "tests/virtual/test_back_pressure.py",
        ],
    ),
    "why": Area(
        [
            "offload.scheduler.why.absence",
            "offload.scheduler.why.notes",
            "offload.scheduler.why.prompts",
            "allocator.departures",
            "offload.vllm.request_ids",
        ],
        [
            "tests/allocator/test_departures.py",
            "tests/offload/scheduler/test_prompts.py",
            "tests/offload/vllm/test_request_ids.py",
            "tests/virtual/test_why.py",
        ],
    ),
    "ledger": Area(["offload.scheduler.jobs"], ["tests/offload/scheduler/test_jobs_machine.py"]),
    "amounts": Area(["offload.scheduler.amounts"], ["tests/offload/scheduler/test_amounts.py"]),
    "hints": Area(
        ["offload.scheduler.hints", "offload.scheduler.kv_hints", "offload.scheduler.client_values"],
        [
            "tests/offload/scheduler/test_hints.py",
            "tests/offload/scheduler/test_hint_sources.py",
            "tests/offload/scheduler/test_kv_hints.py",
        ],
    ),
    "answers": Area(["offload.scheduler.answers"], ["tests/offload/scheduler/test_answers.py"]),
    "turns": Area(
        ["offload.scheduler.turns", "offload.scheduler.miniatures", "offload.vllm.engine"],
        ["tests/offload/scheduler/test_turns.py", "tests/offload/vllm/test_answer_endings.py"],
    ),
    "seals": Area(
        [
            "offload.worker.seals",
            "offload.worker.transfer",
            "offload.worker.jobs",
            "offload.worker.allowance",
        ],
        ["tests/offload/worker/test_seals.py", "tests/offload/worker/test_transfer.py"],
    ),
    "resize": Area(
        [
            "offload.scheduler.pool_target",
            "offload.scheduler.resizing",
            "offload.worker.resizing",
            "offload.worker.pool.memory",
            "offload.worker.pool.pressure",
            "offload.vllm.pool_size",
        ],
        [
            "tests/offload/scheduler/test_resizing.py",
            "tests/offload/worker/pool/test_pressure.py",
            "tests/offload/worker/test_resizing.py",
        ],
    ),
    "chained": Area(
        [
            "offload.scheduler.arrivals",
            "offload.worker.elsewhere",
            "offload.worker.following",
            "offload.worker.jobs",
            "offload.worker.seals",
            "offload.worker.transfer",
        ],
        [
            "tests/offload/worker/test_elsewhere.py",
            "tests/offload/worker/test_following.py",
            "tests/offload/worker/test_pump.py",
            "tests/virtual/test_chained_fetches.py",
        ],
    ),
    "kv_index": Area(["offload.proxy.kv_index"], ["tests/offload/proxy/test_kv_index.py"]),
    "kv_streams": Area(["offload.proxy.kv_streams"], ["tests/offload/proxy/test_kv_streams.py"]),
}

LEFT_OUT = {
    "test_any_order_of_calls",  # they count what they have met, and here they are cut short;
    "test_the_allocator_does_what_its_model_does",  # their machines are in tests/mutants/machines.py
    "test_the_allocator_with_checkpoints_does_what_its_model_does",
    "test_the_tree_does_what_its_model_does",
    "test_leaf_lru_is_lru_over_single_keys",
    "test_a_long_history_leaves_nothing_behind",  # these take long
    "test_hits_are_those_of_the_policy_over_single_blocks",
    "test_the_share_holds_in_random_histories_of_a_pool",
    "test_random_histories",
    "test_lazy_engines_of_any_kind",
}
"""Tests by name."""
