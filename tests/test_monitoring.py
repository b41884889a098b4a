"""What docs/monitoring has for Prometheus and Grafana; tests/engine/test_serve.py scrapes a real engine."""

import re
import subprocess
from typing import Any

import yaml

from offload.observe.metrics import METRICS
from tests.monitoring import DASHBOARD, FOLDER, metrics_in, program, queries

ALERTS: list[dict[str, Any]] = [
    rule
    for group in yaml.safe_load((FOLDER / "alerts.yaml").read_text())["groups"]
    for rule in group["rules"]
]
OURS = {f"vllm:cpu_offload_{spec.name}{'_total' if spec.is_counter else ''}" for spec in METRICS}


def promtool(*arguments: str) -> None:
    done = subprocess.run(
        [program("promtool"), *arguments], cwd=FOLDER, check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_alerts_are_rules() -> None:
    promtool("check", "rules", "alerts.yaml")


def test_each_alert_fires_and_does_not_before() -> None:
    promtool("test", "rules", "alerts_test.yaml")


def test_there_is_a_test_of_each_alert() -> None:
    """In which it fires, one in which it does not, and one of a healthy engine."""
    tests = yaml.safe_load((FOLDER / "alerts_test.yaml").read_text())["tests"]
    checks = [check for test in tests for check in test["alert_rule_test"]]
    names = {rule["alert"] for rule in ALERTS}
    assert len(names) == len(ALERTS) > 8
    assert {check["alertname"] for check in checks if check["exp_alerts"]} == names
    assert {check["alertname"] for check in tests[0]["alert_rule_test"] if not check["exp_alerts"]} == names
    silent = [
        check["alertname"]
        for test in tests[1:]
        for check in test["alert_rule_test"]
        if not check["exp_alerts"]
    ]
    assert set(silent) == names


def test_alerts_and_panels_ask_for_metrics_that_are_there() -> None:
    named = set()
    for text in [*(query.expression for query in queries()), *(rule["expr"] for rule in ALERTS)]:
        named |= {name for name in metrics_in(text) if "cpu_offload" in name}
    assert len(named) > 30
    assert named <= OURS


def test_panels_are_named_and_do_not_overlap() -> None:
    panels = DASHBOARD["panels"]
    assert (
        len({panel["title"] for panel in panels})
        == len({panel["id"] for panel in panels})
        == len(panels)
        > 10
    )
    taken = set()
    for panel in panels:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not taken & cells and place["x"] + place["w"] <= 24
        taken |= cells
        assert panel["description"] and panel["targets"]
        assert all("$instance" in target["expr"] for target in panel["targets"])


def test_operations_says_what_to_do_about_each_alert() -> None:
    page = (FOLDER.parent / "operations.md").read_text()
    listed = re.findall(r"^\| `(KvOffload\w+)` \|", page, re.MULTILINE)
    assert listed == [rule["alert"] for rule in ALERTS]
