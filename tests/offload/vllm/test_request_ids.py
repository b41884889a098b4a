"""Which of vLLM's requests a client means by an id."""

import pytest

from offload.vllm.request_ids import names

OTHERS = ["", "0", "1", "cmpl", "chatcmpl", "89abcdef", "c", "ab", "x-abc", "cmpl-ab", "0_abc"]


@pytest.mark.parametrize(
    "request_id",
    [
        "cmpl-abc-0-89abcdef",
        "cmpl-abc-3-00000000",
        "1_cmpl-abc-0-89abcdef",
        "chatcmpl-abc-89abcdef",
        "12_chatcmpl-abc-89abcdef",
        "chatcmpl-abc_1-89abcdef",
        "cmpl-abc-0",
        "abc-89abcdef",
    ],
)
def test_the_id_of_the_header(request_id: str) -> None:
    assert names(request_id, "abc")
    assert not any(names(request_id, other) for other in OTHERS)
    assert not names(request_id, "abd")


def test_the_id_of_the_response() -> None:
    assert names("cmpl-abc-0-89abcdef", "cmpl-abc") and names("1_cmpl-abc-0-89abcdef", "cmpl-abc")
    assert names("chatcmpl-abc-89abcdef", "chatcmpl-abc")
    assert not names("chatcmpl-abc-89abcdef", "cmpl-abc")
    assert names("cmpl-abc-0-89abcdef", "cmpl-abc-0-89abcdef"), "vLLM's own, as in its log"


def test_parts_of_an_id_are_not_the_id() -> None:
    """Random ids of vLLM: 16 to 32 hexadecimal digits, and those with parts between."""
    request = "cmpl-0f3a-4b5c-6d7e-0-89abcdef"
    assert names(request, "0f3a-4b5c-6d7e") and names(request, "cmpl-0f3a-4b5c-6d7e")
    assert not any(names(request, part) for part in ("0f3a", "4b5c", "6d7e", "0", "89abcdef", "cmpl", ""))


@pytest.mark.parametrize("request_id", ["", "-", "_", "1_", "cmpl-", "-89abcdef", "\0" * 9, "é" * 300])
def test_ids_of_nobody(request_id: str) -> None:
    assert not names(request_id, "abc")
