"""What moves extents on the calling thread, for runs that must be the same every time."""

from typing import Any

from offload.worker.media.base import MediumJob, Verb
from offload.worker.media.runner import Runner, _Mover


class InlineRunner(Runner):
    """Does at once what it is given, and has no threads."""

    def __init__(self, name: str, move: Any, num_threads: dict[Verb, int], **others: Any) -> None:
        """As ``Runner``; how many threads there would be does not matter."""
        super().__init__(name, move, {}, **others)
        self.is_over.set()

    def submit(self, job: MediumJob) -> None:
        super().submit(job)
        while self._waiting[job.verb]:
            mover = _Mover(job.verb, 0)
            taken = self._take(mover)
            assert taken is not None, f"{job} waits, and there is nothing to take"
            self._work(mover, *taken)
