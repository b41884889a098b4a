"""A cache comes to lie on huge pages, of the real kernel, and holds what it held."""

import errno
import logging
import mmap
import os
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from offload.doctor.machine import mapped_at
from offload.worker import cache_pages
from offload.worker.cache_pages import HUGE_BYTES, CachePages
from offload.worker.pool.pages import THP_SWITCH

_COLLAPSES_SINCE = (6, 1)
_PATIENCE_SECONDS = 60.0
_NUM_WHOLE = 5


@pytest.fixture
def cache() -> torch.Tensor:
    """Small pages, all of them written; the last ones, at least, fill no huge page."""
    mapping = mmap.mmap(-1, (_NUM_WHOLE + 1) * HUGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    mapping.madvise(mmap.MADV_NOHUGEPAGE)
    found = torch.frombuffer(mapping, dtype=torch.int64)[:-1]
    found.copy_(torch.arange(len(found)))
    return found


@pytest.fixture
def possible(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever this machine has."""
    monkeypatch.setattr(cache_pages, "_are_possible", lambda: True)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch, possible: None) -> list[tuple[int, ...]]:
    """What the kernel would have been asked."""
    calls: list[tuple[int, ...]] = []
    monkeypatch.setattr(cache_pages, "madvise", lambda *what: calls.append(what))
    return calls


def wait(pages: CachePages) -> None:
    assert pages._thread is not None
    pages._thread.join(_PATIENCE_SECONDS)
    assert not pages._thread.is_alive()
    assert not pages._storages
    pages.check_invariants()


def starts(cache: torch.Tensor) -> list[int]:
    """Of what fills huge pages."""
    storage = cache.untyped_storage()
    first = -(-storage.data_ptr() // HUGE_BYTES) * HUGE_BYTES
    num = (storage.data_ptr() + storage.nbytes() - first) // HUGE_BYTES
    assert num >= _NUM_WHOLE
    return [first + index * HUGE_BYTES for index in range(num)]


def test_it_lies_on_huge_pages_and_holds_what_it_held(
    cache: torch.Tensor, caplog: pytest.LogCaptureFixture
) -> None:
    if mmap.PAGESIZE != 4096 or not THP_SWITCH.exists() or "[never]" in THP_SWITCH.read_text():
        pytest.skip("there are no huge pages of 2 MiB here, or they are off")
    caplog.set_level(logging.INFO)
    pages = CachePages({"layer": cache})
    wait(pages)
    assert torch.equal(cache, torch.arange(len(cache)))
    assert "GiB of the KV cache lies on huge pages" in caplog.text
    if tuple(int(part) for part in os.uname().release.split(".")[:2]) < _COLLAPSES_SINCE:
        pytest.skip(f"Linux {os.uname().release} makes none of small pages")
    if os.strerror(errno.ENOMEM) in caplog.text:
        pytest.skip("the kernel has no huge pages left")
    whole = starts(cache)
    assert pages.num_huge == len(whole)
    assert mapped_at(os.getpid(), whole[0], len(whole) * HUGE_BYTES).huge >= len(whole) * HUGE_BYTES


def test_all_that_fills_huge_pages_is_asked_for_once(
    cache: torch.Tensor, asked: list[tuple[int, ...]]
) -> None:
    wait(CachePages({"layer.0": cache[:100], "layer.1": cache[100:]}))
    collapse = 25  # in Linux's headers
    assert asked == [
        (start, HUGE_BYTES, advice) for start in starts(cache) for advice in (mmap.MADV_HUGEPAGE, collapse)
    ]


@pytest.mark.parametrize(
    ("page_bytes", "switch"),
    [(1 << 16, "always [madvise] never"), (4096, "always madvise [never]"), (4096, None)],
)
def test_where_huge_pages_are_off_or_others_none_is_asked_for(
    page_bytes: int,
    switch: str | None,
    cache: torch.Tensor,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cache_pages, "mmap", SimpleNamespace(PAGESIZE=page_bytes))
    monkeypatch.setattr(cache_pages, "THP_SWITCH", tmp_path / "enabled")
    if switch is not None:
        (tmp_path / "enabled").write_text(switch)
    assert CachePages({"layer": cache})._thread is None


def test_what_fills_no_huge_page_needs_no_thread(possible: None) -> None:
    small = torch.zeros(HUGE_BYTES // 2, dtype=torch.uint8)
    assert CachePages({"layer": small})._thread is None


@pytest.mark.parametrize(
    ("codes", "num_asked", "num_huge"),
    [
        ([errno.EINVAL], 1, 0),  # it does not know of that, or they are off
        ([0, errno.EINVAL], _NUM_WHOLE, _NUM_WHOLE - 1),  # this piece only
        ([errno.ENOMEM], _NUM_WHOLE, _NUM_WHOLE - 1),
        ([errno.EAGAIN, errno.EBUSY], _NUM_WHOLE, _NUM_WHOLE - 2),
        ([errno.ENOMEM, errno.ENOMEM, errno.ENOMEM], 3, 0),  # in a row
        ([errno.ENOMEM, errno.ENOMEM, 0, errno.ENOMEM, errno.ENOMEM], _NUM_WHOLE, _NUM_WHOLE - 4),
    ],
)
def test_what_the_kernel_refuses_costs_no_more_than_that(
    codes: list[int],
    num_asked: int,
    num_huge: int,
    cache: torch.Tensor,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    possible: None,
) -> None:
    caplog.set_level(logging.INFO)
    tried: list[int] = []

    def refuse(address: int, nbytes: int, advice: int) -> None:
        if advice == mmap.MADV_HUGEPAGE:
            return
        tried.append(address)
        if len(tried) <= len(codes) and (code := codes[len(tried) - 1]):
            raise OSError(code, "refused on purpose")

    monkeypatch.setattr(cache_pages, "madvise", refuse)
    monkeypatch.setattr(cache_pages, "_MOST_REFUSALS", 3)
    pages = CachePages({"layer": cache})
    num_more = len(pages._pieces) - _NUM_WHOLE  # where its beginning fills one, too
    wait(pages)
    goes_on = num_asked == _NUM_WHOLE
    assert len(tried) == num_asked + goes_on * num_more
    assert pages.num_huge == num_huge + goes_on * num_more
    assert "the last refusal: [Errno" in caplog.text
    assert "refused on purpose" in caplog.text


def test_an_engine_that_ends_waits_for_no_piece(
    cache: torch.Tensor, monkeypatch: pytest.MonkeyPatch, possible: None
) -> None:
    has_begun, may_end = threading.Event(), threading.Event()
    tried: set[int] = set()

    def hold(address: int, *_: Any) -> None:
        tried.add(address)
        has_begun.set()
        may_end.wait(_PATIENCE_SECONDS)

    monkeypatch.setattr(cache_pages, "madvise", hold)
    pages = CachePages({"layer": cache})
    assert has_begun.wait(_PATIENCE_SECONDS)
    pages.close()
    assert pages._storages  # the kernel is still at it
    may_end.set()
    wait(pages)
    assert len(tried) == 1
