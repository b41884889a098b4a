"""Benchmarks silence logging, vLLM's too, for their process and its children; here that is everybody's."""

import logging
import os
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def process_is_as_before() -> Iterator[None]:
    disabled, environment = logging.root.manager.disable, dict(os.environ)
    yield
    logging.disable(disabled)
    for name in set(os.environ) - set(environment):
        del os.environ[name]
    os.environ.update(environment)
