"""A medium as far away as a link: what it does is told when the link would have carried it."""

from dataclasses import replace

from offload.messages import NAME_BYTES
from offload.testing.copiers.paced import Link
from offload.worker.media.base import Medium, MediumEnd, MediumJob, Verb


class PacedMedium:
    """Wraps a medium. Jobs of one verb take the link one after the other; verbs do not wait for each other.

    A job begins in the medium at once. So what a GET brings is in its slots before the end is told.
    """

    def __init__(self, inner: Medium, link: Link, slot_bytes: float, *, keeps: bool = True) -> None:
        """``slot_bytes``: of the link for each slot. Unless it ``keeps``, what is put goes no further."""
        self._inner = inner
        self._link = link
        self._slot_bytes = slot_bytes
        self._keeps = keeps
        self._due: dict[int, tuple[float, float]] = {}  # by job: when it was submitted, when its end is told
        self._ended: list[MediumEnd] = []
        self._is_closed = False

    @property
    def is_off(self) -> bool:
        return self._inner.is_off

    def submit(self, job: MediumJob) -> None:
        is_question = job.verb is Verb.PROBE
        size = job.num_extents * NAME_BYTES if is_question else len(job.slots) * self._slot_bytes
        self._due[job.job_id] = self._link.clock.now, self._link.book(job.verb, size)
        if job.verb is Verb.PUT and not self._keeps:
            self._ended.append(MediumEnd(job.job_id, job.num_extents, None, 0.0, int(size)))
        else:
            self._inner.submit(job)

    def poll(self) -> list[MediumEnd]:
        self._ended += self._inner.poll()
        now = self._link.clock.now
        told = [end for end in self._ended if self._is_closed or self._due[end.job_id][1] <= now]
        self._ended = [end for end in self._ended if end not in told]
        return [self._end(end) for end in told]

    def close(self, seconds: float) -> bool:
        """What the link has not carried yet is told at once."""
        self._is_closed = True
        return self._inner.close(seconds)

    def _end(self, end: MediumEnd) -> MediumEnd:
        began, due = self._due.pop(end.job_id)
        return replace(end, seconds=due - began)
