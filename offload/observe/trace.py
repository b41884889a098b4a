"""Prefix-hash traces: reads the format published with the Mooncake paper (FAST 2025), a JSON object per line.

``timestamp`` is in milliseconds, ``input_length`` and ``output_length`` are in tokens. ``hash_ids`` has an id
for every 512 tokens of the prompt, which stands for them and all before them. ``recorder`` writes the same
from live traffic. Fields may be there that Mooncake's traces lack. ``stop`` says how the answer ended,
``api_ms`` how many milliseconds after the arrival, ``session`` of whose turns the request is one.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from offload.errors import TraceError

__all__ = ["IDS_BLOCK_TOKENS", "TraceError", "TraceRequest", "read_trace"]

IDS_BLOCK_TOKENS = 512
"""Tokens that one id of a trace stands for."""

_TOO_LARGE = 1 << 63


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """One line of a trace.

    Attributes:
        timestamp_seconds: of its arrival, since the trace began.
        input_length: of the prompt, in tokens.
        output_length: of the answer, in tokens, at least 1.
        hash_ids: of the full blocks of ``IDS_BLOCK_TOKENS`` tokens of its prompt.
        stop: how the answer ended, equal where answers ended alike; None if the trace does not say.
        answer_seconds: from its arrival to the end of the answer; 0 if the trace does not say.
        session: equal for turns of one user or agent; None if the trace does not say.
    """

    timestamp_seconds: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]
    stop: str | None = None
    answer_seconds: float = 0.0
    session: int | str | None = None


def read_trace(path: Path, limit: int | None = None) -> list[TraceRequest]:
    """The first ``limit`` requests of a trace (None: all), in order of arrival. O(file).

    The last id of a prompt is dropped if it stands for a partial block, which no engine caches.

    Raises:
        TraceError: a line that is not a request, or no line at all.
        OSError: the file cannot be read.
    """
    requests: list[TraceRequest] = []
    with path.open(encoding="utf-8", errors="replace") as lines:  # what is no text is no JSON either
        for number, line in enumerate(lines, 1):
            if limit is not None and len(requests) >= limit:
                break
            if line.strip():
                requests.append(_parse(line, f"{path}, line {number}"))
    if not requests:
        raise TraceError(f"{path}: has no requests; record some with record_trace and let them end")
    return sorted(requests, key=lambda request: request.timestamp_seconds)


def _parse(line: str, where: str) -> TraceRequest:
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise TraceError(
            f"{where}: {line.strip()[:80]!r} is not JSON ({error}); give a file that record_trace has written"
        ) from None
    if not isinstance(fields, dict):
        raise TraceError(f"{where}: {line.strip()[:80]!r} must be a JSON object")
    timestamp = _number(fields, "timestamp", where, int | float, 0)
    input_length = _number(fields, "input_length", where, int, 1)
    output_length = _number(fields, "output_length", where, int, 1)
    if "hash_ids" not in fields:
        raise _lacks("hash_ids", where)
    ids = fields["hash_ids"]
    if not isinstance(ids, list) or any(type(each) is not int for each in ids):
        raise TraceError(f"{where}: hash_ids={str(ids)[:80]}: must be a list of whole numbers")
    full, covering = input_length // IDS_BLOCK_TOKENS, -(-input_length // IDS_BLOCK_TOKENS)
    if not full <= len(ids) <= covering:
        raise TraceError(
            f"{where}: hash_ids has {len(ids)} ids; input_length={input_length} takes {full} for full blocks "
            f"of {IDS_BLOCK_TOKENS} tokens, or {covering} with a partial one"
        )
    stop = fields.get("stop")
    if stop is not None and not isinstance(stop, str):
        raise TraceError(f"{where}: stop={str(stop)[:80]!r}: must be text")
    took = _number(fields, "api_ms", where, int | float, 0) if "api_ms" in fields else 0
    session = fields.get("session")
    if session is not None and type(session) not in (int, str):
        raise TraceError(f"{where}: session={str(session)[:80]!r}: must be a whole number or text")
    told = stop, took / 1000, session
    return TraceRequest(timestamp / 1000, input_length, output_length, tuple(ids[:full]), *told)


def _number(fields: dict[str, Any], name: str, where: str, kind: Any, least: int) -> Any:
    if name not in fields:
        raise _lacks(name, where)
    value = fields[name]
    if isinstance(value, bool) or not isinstance(value, kind) or not least <= value < _TOO_LARGE:
        what = "whole number" if kind is int else "number"
        raise TraceError(f"{where}: {name}={value!r}: must be a {what}, at least {least} and below 2**63")
    return value


def _lacks(name: str, where: str) -> TraceError:
    return TraceError(f"{where} lacks {name}; give a trace of record_trace, or one in Mooncake's format")
