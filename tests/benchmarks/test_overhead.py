"""What overhead says of its ratios."""

import random

import pytest
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

from benchmarks.common.bare_connector import BareConnector
from benchmarks.long_document_qa.arguments import make_settings
from benchmarks.long_document_qa.engine import kv_transfer_config
from benchmarks.long_document_qa.settings import BARE
from benchmarks.overhead.__main__ import interval


def test_ratios_that_are_alike_leave_no_doubt() -> None:
    assert list(interval([1.02] * 8)) == pytest.approx([1.02, 1.02])


def test_one_start_says_nothing() -> None:
    assert interval([1.02]) == (0.0, float("inf"))


def test_an_interval_is_as_published() -> None:
    """Eight values of mean 0 and standard deviation 1 (in logarithms): 2.365 / sqrt(8) = 0.8362."""
    logs = [each * (7 / 8) ** 0.5 for each in (1, -1) * 4]
    low, high = interval([2.718281828459045**each for each in logs])
    assert [low, high] == pytest.approx([2.718281828459045**-0.8362, 2.718281828459045**0.8362], 1e-3)


@pytest.mark.parametrize("count", [2, 8, 40])
def test_19_of_20_intervals_have_what_is_true(count: int) -> None:
    rng = random.Random(0)
    hits = 0
    for _ in range(2000):
        low, high = interval([rng.lognormvariate(0.01, 0.03) for _ in range(count)])
        hits += low <= 2.718281828459045**0.01 <= high
        assert low < high
    assert 0.93 < hits / 2000 < 0.98


def test_vllm_finds_the_connector_that_does_nothing() -> None:
    """And could make one: it lacks no hook that vLLM demands."""
    config = kv_transfer_config(make_settings({}), BARE)
    assert config is not None
    assert KVConnectorFactory.get_connector_class(KVTransferConfig(**config)) is BareConnector
    assert not BareConnector.__abstractmethods__
