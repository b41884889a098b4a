"""Where vLLM keeps what a client asked for with a request."""

from itertools import islice
from typing import TYPE_CHECKING

from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope

from offload.scheduler.client_values import quoted, warn_once
from offload.scheduler.hints import RequestHints, read_hints
from offload.scheduler.kv_hints import MAX_ACTIONS, SOURCE, KvAction

if TYPE_CHECKING:
    from vllm.v1.request import Request


def hints_of(request: "Request") -> RequestHints:
    """The hints of a request. O(1); never raises.

    ``vllm_xargs`` are ``extra_args`` of the sampling parameters. A pooling request has none, nor
    ``kv_transfer_params``: only ``kv_hints``, and those from ``add_request`` alone.
    """
    sampling = request.sampling_params
    xargs = None if sampling is None else sampling.extra_args
    envelope = request.kv_hints
    return read_hints(request.kv_transfer_params, xargs, () if envelope is None else _actions_of(envelope))


def _actions_of(envelope: object) -> list[KvAction]:
    """The first actions in it. In an engine in the caller's process nobody has checked their types."""
    actions = envelope.actions if isinstance(envelope, KvHintsEnvelope) else None
    if not isinstance(actions, list):
        warn_once(
            SOURCE, "no envelope", f"ignored: {quoted(envelope)} is not an envelope with a list of actions"
        )
        return []
    return [_action_of(action) for action in islice(actions, MAX_ACTIONS + 1)]


def _action_of(action: object) -> KvAction:
    if isinstance(action, KvHintAction):
        return KvAction(action.action_type, action.action_version, action.payload)
    return KvAction(action, None, None)
