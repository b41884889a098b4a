"""What the scheduler's side counts of its jobs."""

import pytest

from offload.messages import JobReport, WorkerReport
from offload.scheduler.flow import Job
from tests.offload.scheduler.serving import Serving, Sizes


@pytest.mark.parametrize("seconds", [(0.5, 2.0), (2.0, 0.5)])
def test_a_copy_takes_as_long_as_on_its_slowest_rank_also_if_ranks_tell_of_it_in_different_steps(
    seconds: tuple[float, float],
) -> None:
    serving = Serving(Sizes(num_ranks=2))
    serving.send(range(8), [7])
    serving.step()
    side = serving.side
    jobs: list[Job[object]] = list(side.ledger)
    assert {job.flow.route.label for job in jobs} == {"gpu_to_pool"}
    side.take_metrics()
    for each in seconds:
        told = {job.job_id: JobReport(1, job.num_blocks, seconds=each, nbytes=10) for job in jobs}
        side.receive(WorkerReport(told), set())
    counted = side.take_metrics()
    assert not len(side.ledger)
    assert counted["route_seconds:gpu_to_pool"] == 2.0 * len(jobs)
    assert counted["route_bytes:gpu_to_pool"] == 20 * len(jobs)
