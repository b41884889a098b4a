"""The virtual engine's own noise: faults made on purpose are not worth a warning each."""

import gc
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from offload.testing.virtual import VirtualEngine
from tests.virtual.driver import Engines, make_engine

gc.collect()
gc.freeze()  # what modules are made of stays: so engines that are over are collected sooner


@pytest.fixture(autouse=True)
def _no_warnings_about_intended_faults() -> Iterator[None]:
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture
def engines() -> Iterator[Engines]:
    """Makes engines and closes them."""
    made: list[VirtualEngine] = []

    def make(**settings: Any) -> VirtualEngine:
        made.append(make_engine(**settings))
        return made[-1]

    yield make
    for engine in made:
        engine.close()
