"""A real Prometheus for tests, Debian's; and what docs/monitoring has for it."""

import json
import re
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from offload.testing.engines.server import held_port

FOLDER = Path(__file__).parents[1] / "docs" / "monitoring"
DASHBOARD: dict[str, Any] = json.loads((FOLDER / "dashboard.json").read_text())
_WAIT_SECONDS = 60.0
_VARIABLES = {"$__rate_interval": "1m", "$instance": ".+"}
"""What Grafana puts in the place of these, of one engine that is scraped every second."""


class Query(NamedTuple):
    """One of a panel."""

    panel: str
    expression: str


def queries() -> list[Query]:
    """Of all panels, as Grafana sends them."""
    found = []
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            expression = target["expr"]
            for name, value in _VARIABLES.items():
                expression = expression.replace(name, value)
            found.append(Query(panel["title"], expression))
    return found


def program(name: str) -> str:
    """Its path; the test is skipped where it is not installed."""
    found = shutil.which(name)
    if found is None:
        pytest.skip(f"{name} is not installed (Debian: apt-get install prometheus)")
    return found


def metrics_in(text: str) -> set[str]:
    """Names of vLLM's metrics, and ours among them."""
    return set(re.findall(r"vllm:\w+", text))


class Prometheus:
    """One that scrapes a target every second, and what is asked of it."""

    def __init__(self, address: str) -> None:
        """``address``: its own."""
        self._address = address

    def ask(self, expression: str) -> list[dict[str, Any]]:
        """The samples of an instant query. An error of the query fails the test; OSError: it starts."""
        query = urllib.parse.urlencode({"query": expression})
        try:
            with urllib.request.urlopen(f"{self._address}/api/v1/query?{query}", timeout=30) as response:
                answer = json.load(response)
        except urllib.error.HTTPError as error:
            if error.code == HTTPStatus.SERVICE_UNAVAILABLE:  # it starts
                raise
            raise AssertionError(f"{expression}: {error.read().decode()}") from error
        assert answer["status"] == "success", answer
        found: list[dict[str, Any]] = answer["data"]["result"]
        return found

    def wait_for(self, expression: str) -> list[dict[str, Any]]:
        """The same, once there are samples."""
        until = time.monotonic() + _WAIT_SECONDS
        while True:
            try:
                found = self.ask(expression)
            except urllib.error.URLError:
                found = []  # it does not listen yet, or starts
            if found:
                return found
            assert time.monotonic() < until, f"{expression} has no samples"
            time.sleep(0.1)


@contextmanager
def scraping(folder: Path, target: str) -> Iterator[Prometheus]:
    """Inside, that ``host:port`` is scraped, and what was read lies in ``folder``."""
    command = program("prometheus")
    jobs = [{"job_name": "vllm", "static_configs": [{"targets": [target]}]}]
    config = {"global": {"scrape_interval": "1s"}, "scrape_configs": jobs}
    (folder / "prometheus.yml").write_text(json.dumps(config))  # which is YAML, too
    held = held_port()
    address = f"127.0.0.1:{held.getsockname()[1]}"
    arguments = [
        f"--config.file={folder / 'prometheus.yml'}",
        f"--storage.tsdb.path={folder / 'data'}",
        f"--web.listen-address={address}",
    ]
    log = (folder / "prometheus.log").open("w")
    process = subprocess.Popen([command, *arguments], stdout=log, stderr=log)
    try:
        yield Prometheus(f"http://{address}")
    finally:
        process.terminate()
        process.wait()
        log.close()
        held.close()
