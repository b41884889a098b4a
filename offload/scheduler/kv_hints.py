"""Actions of vLLM's ``kv_hints``, in the words of our own request keys. Experimental.

vLLM defines the envelope and no actions. The names below are those of its open request for comments
(vllm-project/vllm issue 51428); the payloads are ours. Both may change with it.

=============  ==========================  ========================
action         payload                     read as
=============  ==========================  ========================
``kv.retain``  ``ttl_seconds``             ``ttl_seconds``
\\              ``priority``                ``priority``
``kv.pin``     ``ttl_seconds``             ``pin_seconds``
``kv.demote``  nothing needed              ``keep: false``
=============  ==========================  ========================
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

from offload.scheduler.client_values import quoted, warn_once

SOURCE = "kv_hints"
"""The name of the envelope's place in a request."""

MAX_ACTIONS = 64
"""Actions of a request that are looked at."""

_PAYLOAD = ("ttl_seconds", "priority")
_READS: dict[str, dict[str, str]] = {
    "kv.retain": {"ttl_seconds": "ttl_seconds", "priority": "priority"},
    "kv.pin": {"ttl_seconds": "pin_seconds"},
    "kv.demote": {},
}
_WITHOUT_EFFECT = ("kv.prefetch", "kv.fetch")


class KvAction(NamedTuple):
    """An action as a client sent it: nothing in it is known to be well formed.

    Attributes:
        action_type: such as "kv.pin".
        version: such as "1.0".
        payload: an object of keys and values.
    """

    action_type: object
    version: object
    payload: object


class Wish(NamedTuple):
    """One hint that an action asks for, its value not checked.

    Attributes:
        name: of the hint, without the prefix of our own keys.
        value: what was sent.
        said: where it was sent, for warnings.
    """

    name: str
    value: object
    said: str


def wishes(actions: Sequence[KvAction]) -> Iterator[Wish]:
    """What these actions ask for, in their order. O(1): ``MAX_ACTIONS`` are looked at.

    An action that is not in the table, or not of version 1, is ignored with one warning per kind. So is one
    with anything else in its payload: it may be about KV of others than the request it came with.
    """
    if len(actions) > MAX_ACTIONS:
        warn_once(SOURCE, "many", f"ignored: all actions of a request after the first {MAX_ACTIONS}")
    for action in actions[:MAX_ACTIONS]:
        yield from _wishes_of(action)


def _wishes_of(action: KvAction) -> Iterator[Wish]:
    kind, version, payload = action
    if not isinstance(kind, str) or kind not in tuple(_READS):  # which hashes no long text
        _warn_of_action(kind)
        return
    if not isinstance(version, str) or not (version == "1" or version.startswith("1.")):
        warn_once(SOURCE, "version", f"ignored: {kind!r} has the version {quoted(version)}; use '1.0'")
        return
    if not isinstance(payload, Mapping):
        warn_once(SOURCE, "payload", f"ignored: the payload of {kind!r} is {quoted(payload)}; use an object")
        return
    num_known = sum(key in payload for key in _PAYLOAD)
    if len(payload) > num_known:
        other = next(key for key in islice(payload, num_known + 1) if key not in _PAYLOAD)
        problem = f"ignored: {kind!r} says {quoted(other)}, which is unknown; known are {', '.join(_PAYLOAD)}"
        warn_once(SOURCE, "payload key", problem)
        return
    if kind == "kv.demote":
        yield Wish("keep", False, kind)
        return
    said = {key: payload[key] for key in _READS[kind] if payload.get(key) is not None}
    if not said:
        warn_once(SOURCE, f"empty {kind}", f"ignored: {kind!r} without {' or '.join(_READS[kind])}")
    for key, value in said.items():
        yield Wish(_READS[kind][key], value, f"{kind} {key}")


def _warn_of_action(kind: object) -> None:
    if isinstance(kind, str) and kind in _WITHOUT_EFFECT:
        warn_once(SOURCE, kind, f"ignored: {kind!r} has no effect on this pool")
        return
    warn_once(
        SOURCE, "action", f"ignored: the action {quoted(kind)} is unknown; known are {', '.join(_READS)}"
    )
