"""Jobs that wait for others, which fill the slots that they read."""

from collections.abc import Collection


class Following:
    """Who waits for whom. A job may wait for several, and several for one."""

    def __init__(self) -> None:
        """Nobody waits."""
        self._awaited: dict[int, set[int]] = {}  # by the job that waits
        self._followers: dict[int, list[int]] = {}  # by the job that is awaited, in order

    def __contains__(self, job_id: int) -> bool:
        """Whether that job waits."""
        return job_id in self._awaited

    def wait(self, job_id: int, awaited: Collection[int]) -> None:
        """That job begins once all these are over."""
        self._awaited[job_id] = set(awaited)
        for each in awaited:
            self._followers.setdefault(each, []).append(job_id)

    def leave(self, job_id: int) -> None:
        """That job waits for nobody: it is over."""
        for each in self._awaited.pop(job_id, ()):
            self._followers[each].remove(job_id)
            if not self._followers[each]:
                del self._followers[each]

    def over(self, job_id: int) -> list[int]:
        """That job is over. Returns those that wait for nobody now, in the order in which they came."""
        begun = []
        for follower in self._followers.pop(job_id, ()):
            awaited = self._awaited[follower]
            awaited.discard(job_id)
            if not awaited:
                del self._awaited[follower]
                begun.append(follower)
        return begun

    def check_invariants(self, jobs: Collection[int]) -> None:
        """Whoever waits, and whoever is awaited, is one of these jobs; both sides agree."""
        pairs = {(follower, each) for follower, awaited in self._awaited.items() for each in awaited}
        mirrored = {(follower, each) for each, found in self._followers.items() for follower in found}
        assert pairs == mirrored, f"{pairs} wait, {mirrored} are known to"
        assert all(self._awaited.values()), f"somebody waits for nobody: {self._awaited}"
        lost = {job_id for pair in pairs for job_id in pair if job_id not in jobs}
        assert not lost, f"{lost} are over, and somebody waits"
