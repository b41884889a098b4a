"""What is counted between two looks."""

from offload.observe.metrics import METRICS, Metrics


def test_counters_come_as_increments() -> None:
    metrics = Metrics()
    metrics.count("stored_bytes", 5)
    metrics.count("stored_bytes", 7)
    metrics.count("failed_jobs")
    assert metrics.take() == {"stored_bytes": 12, "failed_jobs": 1}
    metrics.count("stored_bytes", 2)
    assert metrics.take() == {"stored_bytes": 2}


def test_nothing_changed_is_nothing_to_tell() -> None:
    metrics = Metrics()
    metrics.count("stored_bytes", 0)
    metrics.count("restored_requests", False)
    assert metrics.take() == {}
    metrics.show("pool_blocks", 0)
    assert metrics.take() == {"pool_blocks": 0}
    metrics.show("pool_blocks", 0)
    assert metrics.take() == {}


def test_gauges_show_the_last_value() -> None:
    metrics = Metrics()
    metrics.show("jobs_in_flight", 3)
    metrics.show("jobs_in_flight", 1)
    assert metrics.take() == {"jobs_in_flight": 1}
    metrics.show("jobs_in_flight", 2)
    metrics.show("jobs_in_flight", 1)
    assert metrics.take() == {"jobs_in_flight": 1}


def test_with_any_change_come_all_gauges() -> None:
    metrics = Metrics()
    metrics.show("pool_blocks", 10)
    metrics.show("pool_used_blocks", 0)
    metrics.take()
    metrics.count("stored_bytes", 5)
    assert metrics.take() == {"stored_bytes": 5, "pool_blocks": 10, "pool_used_blocks": 0}
    metrics.show("pool_used_blocks", 1)
    assert metrics.take() == {"pool_blocks": 10, "pool_used_blocks": 1}


def test_what_was_taken_is_the_takers() -> None:
    metrics = Metrics()
    metrics.show("pool_blocks", 10)
    taken = metrics.take()
    taken.clear()
    metrics.count("failed_jobs")
    assert metrics.take() == {"failed_jobs": 1, "pool_blocks": 10}


def test_metrics_have_names_of_their_own_and_descriptions() -> None:
    assert len({spec.name for spec in METRICS}) == len(METRICS)
    for spec in METRICS:
        assert spec.name.islower()
        assert not spec.name.endswith("_total"), "the exporter adds it to counters"
        assert spec.description.endswith(".")
