"""A cache comes to lie on huge pages, of the real kernel, and holds what it held."""

import errno
import logging
import mmap
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from offload.doctor.machine import mapped_at
from offload.worker import cache_pages
from offload.worker.cache_pages import HUGE_BYTES, CachePages

_SWITCH = Path("/sys/kernel/mm/transparent_hugepage/enabled")
_PATIENCE_SECONDS = 60.0


@pytest.fixture
def cache() -> torch.Tensor:
    """Small pages, all of them written; neither end fills a huge page."""
    mapping = mmap.mmap(-1, 6 * HUGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapping.madvise(mmap.MADV_NOHUGEPAGE)
    found = torch.frombuffer(mapping, dtype=torch.int64)
    found.copy_(torch.arange(len(found)))
    return found[1:]


def wait(pages: CachePages) -> None:
    assert pages._thread is not None
    pages._thread.join(_PATIENCE_SECONDS)
    assert not pages._thread.is_alive()
    pages.check_invariants()


def test_it_lies_on_huge_pages_and_holds_what_it_held(
    cache: torch.Tensor, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    first, nbytes = cache.data_ptr(), cache.nbytes
    pages = CachePages([(first, nbytes)])
    wait(pages)
    assert torch.equal(cache, torch.arange(1, len(cache) + 1))
    if "small pages" in caplog.text or "[never]" in _SWITCH.read_text():
        pytest.skip(f"this kernel makes none: {caplog.text}")
    assert 1 <= pages.num_huge <= 5
    whole = -(-first // HUGE_BYTES) * HUGE_BYTES
    assert mapped_at("self", whole, 5 * HUGE_BYTES).huge >= pages.num_huge * HUGE_BYTES
    assert "of the KV cache lie on huge pages" in caplog.text


def test_all_that_fills_huge_pages_is_asked_for_once(
    cache: torch.Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[int, int]] = []
    monkeypatch.setattr(
        cache_pages, "madvise", lambda address, nbytes, advice: asked.append((address, nbytes))
    )
    wait(CachePages.of({"layer.0": cache[:100], "layer.1": cache[100:]}))
    storage = cache.untyped_storage()
    first = -(-storage.data_ptr() // HUGE_BYTES) * HUGE_BYTES
    num_pieces = (storage.data_ptr() + storage.nbytes() - first) // HUGE_BYTES
    assert num_pieces >= 5
    pieces = [(first + number * HUGE_BYTES, HUGE_BYTES) for number in range(num_pieces)]
    assert asked == [piece for piece in pieces for _ in range(2)]


def test_what_fills_no_huge_page_needs_no_thread() -> None:
    pages = CachePages([(HUGE_BYTES + 1, 2 * HUGE_BYTES - 2), (0, HUGE_BYTES - 1)])
    assert pages._thread is None
    assert pages.close(0.0)


@pytest.mark.parametrize(
    ("code", "num_asked", "told"),
    [(errno.EINVAL, 1, "lies on small pages"), (errno.ENOMEM, 5, "0 of 0.00977 GiB")],
)
def test_a_kernel_that_refuses_is_asked_no_more(
    code: int, num_asked: int, told: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    asked = []

    def refuse(address: int, nbytes: int, advice: int) -> None:
        asked.append(address)
        raise OSError(code, "refused on purpose")

    monkeypatch.setattr(cache_pages, "madvise", refuse)
    wait(CachePages([(0, 5 * HUGE_BYTES)]))
    assert len(asked) == num_asked
    assert told in caplog.text


def test_an_engine_that_ends_waits_for_the_piece_under_way(monkeypatch: pytest.MonkeyPatch) -> None:
    has_begun, may_end = threading.Event(), threading.Event()
    asked: list[int] = []

    def hold(address: int, *_: Any) -> None:
        asked.append(address)
        has_begun.set()
        may_end.wait(_PATIENCE_SECONDS)

    monkeypatch.setattr(cache_pages, "madvise", hold)
    pages = CachePages([(0, 5 * HUGE_BYTES)])
    assert has_begun.wait(_PATIENCE_SECONDS)
    assert not pages.close(0.01)
    may_end.set()
    assert pages.close(_PATIENCE_SECONDS)
    assert set(asked) == {0}
    assert pages.num_huge == 1
