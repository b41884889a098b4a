"""Codecs are compared by what they give back."""

import random

import pytest

from benchmarks.codecs import __main__ as codecs


@pytest.fixture
def extents() -> list[bytes]:
    """Numbers whose second bytes are all alike, and whose first are not."""
    rng = random.Random(0)
    return [b"".join(bytes([rng.randrange(256), 7]) for _ in range(4096)) for _ in range(2)]


def test_rows(extents: list[bytes]) -> None:
    rows = codecs.measure("bfloat16", extents, 2)
    by_name = {(row["codec"], row["planes"]): row for row in rows}
    assert by_name["copy", False]["ratio"] == by_name["copy", True]["ratio"] == 1
    assert by_name["zlib 1", True]["ratio"] > by_name["zlib 1", False]["ratio"] > 1
    assert all(row["compress_gb_s"] > 0 and row["decompress_gb_s"] > 0 for row in rows)


def test_a_codec_that_changes_bytes_is_found(extents: list[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = codecs.Codec("wrong", lambda each: each, lambda each: each[:-1] + b"x")
    monkeypatch.setattr(codecs, "codecs", lambda: [wrong])
    with pytest.raises(AssertionError, match="wrong changes bytes"):
        codecs.measure("bfloat16", extents, 1)
