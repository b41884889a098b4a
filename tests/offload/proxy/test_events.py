"""Events are the same however a stream is cut into pieces, and stop strings however an answer is."""

import random

import pytest

from offload.proxy.events import DONE, Events, data_of, error_event, event
from offload.proxy.faults import EngineError
from offload.proxy.stops import Stops, stops_of


@pytest.mark.parametrize("seed", range(50))
def test_events_do_not_depend_on_pieces(seed: int) -> None:
    drawn = random.Random(seed)
    whole = [
        drawn.choice(
            [event({"text": "字" * drawn.randrange(5)}), b": keep-alive\n\n", DONE, b"event: x\ndata: 1\n\n"]
        )
        for _ in range(drawn.randrange(1, 12))
    ]
    stream = b"".join(whole)
    cuts = sorted(drawn.randrange(len(stream) + 1) for _ in range(drawn.randrange(12)))
    events, got = Events(1 << 20), []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        if start < end:
            got += list(events.feed(stream[start:end]))
    assert got == whole and events.is_empty


def test_an_event_has_an_end_within_bounds() -> None:
    events = Events(100)
    assert list(events.feed(b"x" * 100)) == []
    with pytest.raises(EngineError, match="more than 100 bytes"):
        list(events.feed(b"x"))


@pytest.mark.parametrize(
    ("whole", "data"),
    [
        (b"data: {}\n\n", b"{}"),
        (b"data:{}\n\n", b"{}"),
        (b"event: x\ndata: 1\ndata: 2\n\n", b"1\n2"),
        (b": comment\n\n", None),
        (b"id: 5\n\n", None),
    ],
)
def test_data_of_an_event(whole: bytes, data: bytes | None) -> None:
    assert data_of(whole) == data


def test_lines_may_end_in_two_characters() -> None:
    assert [data_of(each) for each in Events(1000).feed(b"data: 1\r\n\r\ndata: 2\r\n\r\n")] == [b"1", b"2"]


def test_an_error_is_the_last_thing() -> None:
    assert error_event("why").endswith(DONE) and b'"message":"why"' in error_event("why")


def ends_of(text: str, stops: list[str]) -> int:
    """Where the stop string that ends first ends; beyond the text if none does."""
    return min((text.find(each) + len(each) for each in stops if each in text), default=len(text) + 1)


@pytest.mark.parametrize("seed", range(200))
def test_a_stop_string_is_found_wherever_the_gap_is(seed: int) -> None:
    """One engine has said the first part, less what it held back; the next one goes on piece by piece."""
    drawn = random.Random(seed)
    stops = ["".join(drawn.choices("ab", k=drawn.randrange(1, 5))) for _ in range(drawn.randrange(1, 4))]
    text = "".join(drawn.choices("abc", k=30))
    end = ends_of(text, stops)
    gap = drawn.randrange(min(end, len(text)))  # no stop string has ended there
    reach = max(map(len, stops)) - 1
    is_included = drawn.random() < 0.5
    sent = text[: gap if is_included else max(0, gap - reach)]
    rest = Stops(stops, is_included, sent, text[len(sent) : gap])
    at = gap
    while at < len(text):
        step = drawn.randrange(1, 4)
        piece, at = text[at : at + step], at + step
        # The next engine finds what is in its own part alone.
        own = ends_of(text[gap:at], stops) + gap
        ending = None
        if own <= min(at, len(text)):
            piece = piece[: len(piece) - (min(at, len(text)) - own)]
            ending = next(each for each in stops if text[gap:own].endswith(each))
        is_last = ending is not None or at >= len(text)
        found = rest.push(piece, is_last, ending, True)
        sent += found.text
        if found.stop is not None:
            assert end <= len(text) and text[:end].endswith(found.stop)
            assert sent == text[: end if is_included else end - len(found.stop)]
            return
    assert end > len(text) and sent == text


@pytest.mark.parametrize(
    ("value", "stops"), [("a", ("a",)), (["a", "", 5, "b"], ("a", "b")), (None, ()), ("", ()), (7, ())]
)
def test_stop_strings_of_a_request(value: object, stops: tuple[str, ...]) -> None:
    assert stops_of(value) == stops
