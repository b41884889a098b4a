"""The calls that vLLM's scheduler makes into a connector."""

PHASES = {
    "on_new_request": "lookup",
    "get_num_new_matched_tokens": "lookup",
    "update_state_after_alloc": "plan",
    "build_connector_meta": "plan",
    "update_connector_output": "complete",
    "request_finished": "finish",
    "request_finished_all_groups": "finish",
    "get_external_cache_hit_sources": "other",
    "get_kv_connector_stats": "other",
    "get_loaded_kv_cache_group_ids": "other",
    "has_pending_block_frees": "other",
    "has_pending_push_work": "other",
    "take_events": "other",
}
"""Which phase of a request's life each of the scheduler's calls belongs to."""
