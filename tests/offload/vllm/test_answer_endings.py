"""How an answer has ended, as vLLM's requests say it."""

from collections.abc import Sequence

import pytest
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import SamplingParams
from vllm.v1.request import Request, RequestStatus

from offload.vllm.engine import VllmEngine

TOOL, EOS = 7, 2


def over(status: RequestStatus, answer: Sequence[int], *, is_pooled: bool = False) -> Request:
    sampling, pooling = SamplingParams(max_tokens=9), PoolingParams(task="embed")
    request = Request("r", [1, 2, 3], None if is_pooled else sampling, pooling if is_pooled else None)
    request.append_output_token_ids(list(answer))
    request.status = status
    return request


def ending(status: RequestStatus, answer: Sequence[int]) -> object:
    found = VllmEngine.ending(None, over(status, answer))  # type: ignore[arg-type]
    hash(found)
    return found


def test_an_answer_that_the_model_ended_ends_with_its_last_tokens() -> None:
    stopped = RequestStatus.FINISHED_STOPPED
    assert ending(stopped, [4, 5, TOOL, EOS]) == ending(stopped, [9, TOOL, EOS]) == (TOOL, EOS)
    assert ending(stopped, [9, 8, EOS]) == (8, EOS)
    assert ending(stopped, [EOS]) == (EOS,)


def test_an_answer_that_was_cut_ends_with_what_cut_it() -> None:
    cut = [
        RequestStatus.FINISHED_LENGTH_CAPPED,
        RequestStatus.FINISHED_ABORTED,
        RequestStatus.FINISHED_REPETITION,
    ]
    for status in cut:
        assert ending(status, [4, TOOL, EOS]) == ending(status, [1]) is not None
    assert len({ending(status, [4]) for status in cut}) == len(cut)


@pytest.mark.parametrize("status", [each for each in RequestStatus if RequestStatus.is_finished(each)])
def test_no_answer_ends_no_way(status: RequestStatus) -> None:
    assert ending(status, []) is None
    pooled = over(status, [], is_pooled=True)
    assert VllmEngine.ending(None, pooled) is None  # type: ignore[arg-type]


def test_a_fault_is_no_ending() -> None:
    assert ending(RequestStatus.FINISHED_ERROR, [4, TOOL]) is None
    assert ending(RequestStatus.FINISHED_IGNORED, [4, TOOL]) is None
