"""What a replay engine is asked: requests of a trace, or questions about long documents."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from benchmarks.engine_replay.engine import own_hash
from offload.observe.trace import IDS_BLOCK_TOKENS, TraceRequest

_HASH_BYTES = 32


@dataclass(frozen=True, slots=True)
class ReplayRequest:
    """A request as ``ReplayEngine.add`` takes it. ``arrival`` None: as soon as the one before is answered."""

    req_id: str
    hashes: list[bytes]
    num_prompt: int
    num_output: int
    arrival: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class LongDocuments:
    """Every document is asked about once in each pass, in the same order.

    A question and its answer together are shorter than a block: a pass over documents that the GPU has
    moves nothing.

    Attributes:
        documents: how many.
        document_tokens: of each.
        question_tokens: after the document, of its own.
        answer_tokens: generated.
    """

    documents: int = 24
    document_tokens: int = 6000
    question_tokens: int = 5
    answer_tokens: int = 10

    def ask(self, passes: int, block_size: int, name: str) -> Iterator[ReplayRequest]:
        """The requests of that many passes; ``name`` is unique to the call."""
        num_blocks = self.document_tokens // block_size
        for index in range(passes):
            for document in range(self.documents):
                req_id = f"{name}-{index}-{document}"
                prompt = self.document_tokens + self.question_tokens
                hashes = _hashes(f"document {document}", num_blocks)
                hashes += _own_hashes(req_id, num_blocks, prompt // block_size)
                yield ReplayRequest(req_id, hashes, prompt, self.answer_tokens)

    def blocks_per_document(self, block_size: int) -> int:
        """GPU blocks that a request about one needs."""
        return -(-(self.document_tokens + self.question_tokens + self.answer_tokens) // block_size)


def fits(request: TraceRequest, max_model_len: int, gpu_blocks: int, block_size: int) -> bool:
    """Whether an engine of these sizes can ever answer that request."""
    limit = min(max_model_len, (gpu_blocks - 1) * block_size)  # vLLM keeps one block as the null block
    return request.input_length + request.output_length <= limit


def of_trace(trace: Iterable[TraceRequest], block_size: int, speed: float) -> Iterator[ReplayRequest]:
    """The requests of a trace, each made when asked for. Time runs ``speed`` times as fast as in the trace.

    The blocks of one id have hashes that follow from the id. What is left of a prompt after its last full
    block of the trace has hashes of its own. ``block_size`` has to divide ``IDS_BLOCK_TOKENS``.
    """
    per_id, odd = divmod(IDS_BLOCK_TOKENS, block_size)
    if odd:
        raise ValueError(f"block_size={block_size}: must divide {IDS_BLOCK_TOKENS}")
    for index, request in enumerate(trace):
        req_id = f"trace-{index}"
        hashes = [each for ids in request.hash_ids for each in _hashes(str(ids), per_id)]
        hashes += _own_hashes(req_id, len(hashes), request.input_length // block_size)
        arrival = request.timestamp_seconds / speed
        yield ReplayRequest(req_id, hashes, request.input_length, request.output_length, arrival)


def _hashes(seed: str, count: int) -> list[bytes]:
    """Hashes that follow from ``seed``, of uniform bits as real ones are."""
    stream = hashlib.shake_128(seed.encode()).digest(count * _HASH_BYTES)
    return [stream[at : at + _HASH_BYTES] for at in range(0, len(stream), _HASH_BYTES)]


def _own_hashes(req_id: str, start: int, stop: int) -> list[bytes]:
    return [own_hash(req_id, position) for position in range(start, stop)]
