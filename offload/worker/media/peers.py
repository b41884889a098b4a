"""Pools of peers as a medium: what other engines have is fetched into the own pool, by name."""

import threading
import time
from collections.abc import Callable, Sequence

import numpy as np

from offload.messages import Names, is_private
from offload.naming import ROOT
from offload.peer_messages import Unused
from offload.worker.media.base import (
    AbsentError,
    BadExtentError,
    BrokenExtentError,
    MediumEnd,
    MediumJob,
    PoolSlots,
    Verb,
    reason_against_named,
)
from offload.worker.media.runner import MakeRunner, Runner
from offload.worker.peers.client import Client, Got, Wanted
from offload.worker.peers.fleet import Fleet
from offload.worker.peers.nixl import NixlError
from offload.worker.peers.peer import Peer, PeerStatus
from offload.worker.peers.protocol import MOST_EXTENTS, MOST_NAMES, MOST_SLOTS
from offload.worker.seals import Checksums

_HANG_SECONDS = 20.0
GET_THREADS = 2
_PROBE_THREADS = 2
_EXTENTS_AT_ONCE = 8
_ASK_SECONDS = 0.5
"""Peers that have not answered by then have nothing, as far as a question goes."""
_MOST_REMEMBERED = 1 << 16
_MOST_ASKED = 8
"""Peers that are asked for slots of which nobody knows where they are."""


class Whereabouts:
    """Who had what when it was asked last. For several threads."""

    def __init__(self, most: int = _MOST_REMEMBERED) -> None:
        """Nothing is known. ``most``: names that are remembered, and as many from before."""
        self._most = most
        self._lock = threading.Lock()
        self._new: dict[bytes, Peer] = {}
        self._old: dict[bytes, Peer] = {}

    def note(self, names: Names, peer: Peer) -> None:
        """It has these. O(names)."""
        size = names.shape[1]
        content = np.ascontiguousarray(names).tobytes()
        found = dict.fromkeys((content[at : at + size] for at in range(0, len(content), size)), peer)
        with self._lock:
            if len(self._new) + len(found) > self._most:
                self._new, self._old = {}, self._new
            self._new.update(found)

    def of(self, name: bytes) -> Peer | None:
        """Who had that; None: nobody knows."""
        return self._new.get(name) or self._old.get(name)

    def check_invariants(self) -> None:
        """Not too much is remembered."""
        assert max(len(self._new), len(self._old)) <= max(self._most, MOST_NAMES), "too many names"


class PeerMedium:
    """A ``Medium`` over all peers of a rank, which go on writing, reset, restart and vanish as they like.

    A question goes to all that are connected and have the job's suffix, or to the one that the job names
    (``life``), and the answer is that of who has most. A GET goes to that one first. What comes is received
    where it belongs and compared with the checksums that came with it, always. A peer that fails, is slow or
    has it no more is a miss: the next one is tried, and then the extent is not there. Wrong bytes are an
    error. A job ends when nothing can be written to its slots any more: when what has received them returns.

    It puts nothing. Private suffixes are nobody's. The name ``ROOT`` is that of nothing: a question for it is
    whether anybody is there. A PROBE that is a release asks nothing, and tells the peer of its ``life``.

    ``MediumEnd.reason`` says why a peer that a job names was not asked.
    """

    def __init__(
        self,
        fleet: Fleet,
        pool: PoolSlots,
        *,
        make_runner: MakeRunner = Runner,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start the threads.

        Args:
            fleet: the peers; closed with this.
            pool: whose slots are filled, the one that ``fleet`` knows.
            make_runner: makes what moves extents.
            clock: in seconds.
        """
        self.fleet = fleet
        self._pool = pool
        self._clock = clock
        self._whereabouts = Whereabouts()
        self._turn = 0
        self._refused: list[MediumEnd] = []
        self.runner = make_runner(
            "peers",
            self._move,
            {Verb.GET: GET_THREADS, Verb.PROBE: _PROBE_THREADS},
            slot_bytes=pool.slot_bytes,
            hang_seconds=_HANG_SECONDS,
            probe=self._probe,
            most_extents=_EXTENTS_AT_ONCE,
        )

    @property
    def is_off(self) -> bool:
        return self.runner.hangs(Verb.GET)

    def statuses(self) -> list[PeerStatus]:
        """What there is to tell of each peer; plain data. From any thread."""
        return self.fleet.statuses()

    def submit(self, job: MediumJob) -> None:
        error = reason_against_named(job, self._pool, MOST_SLOTS)
        if job.verb is Verb.PUT:
            error = "a peer's pool is not written to"
        if error is None:
            self.runner.submit(job)
        else:
            self._refused.append(MediumEnd(job.job_id, 0, error))

    def poll(self) -> list[MediumEnd]:
        refused, self._refused = self._refused, []
        return refused + self.runner.poll()

    def close(self, seconds: float) -> bool:
        until = time.monotonic() + seconds
        self.runner.stop()
        if not self.runner.is_over.wait(seconds):
            self.runner.cancel()
        is_closed = self.fleet.close(max(0.1, until - time.monotonic()))
        return self.runner.is_over.wait(0.1) and is_closed

    def check_invariants(self) -> None:
        """Its parts agree with themselves, and nothing of what was refused is good."""
        self.runner.check_invariants()
        self.fleet.check_invariants()
        self._whereabouts.check_invariants()
        assert not any(end.num_good for end in self._refused), f"{self._refused} were refused"

    # On the threads

    def _probe(self, number: int, job: MediumJob) -> int:
        assert job.names is not None
        if is_private(job.suffix):
            return 0
        if job.is_release:
            return self._release(job)
        names = job.names[:MOST_NAMES]
        if job.life is not None:
            peers = [self.fleet.of(job.life)]
        else:
            peers = self.fleet.up(job.suffix)
        if len(names) == 1 and names[0].tobytes() == ROOT:
            return int(bool(peers))

        refusing: list[Peer] = []

        def probe(client: Client) -> tuple[int, bool]:
            num_found = client.probe(names, job.suffix, is_last_wanted=job.is_last_wanted)
            return num_found, client.is_refused

        def ask(peer: Peer) -> int:
            peer.count.probes += 1
            num_found, is_refused = peer.ask(probe)
            if is_refused:
                refusing.append(peer)
            return num_found

        answers = self.fleet.ask(peers, ask, _ASK_SECONDS)
        if job.life is not None and refusing:
            raise AbsentError(f"the peer {job.life.peer} does not hand it off", Unused.REFUSED)
        most = max((num_found for _, num_found in answers), default=0)
        if most:
            best = [peer for peer, num_found in answers if num_found == most]
            self._turn += 1
            found = names[most - 1 : most] if job.is_last_wanted else names[:most]
            self._whereabouts.note(found, best[self._turn % len(best)])
        return most

    def _release(self, job: MediumJob) -> int:
        assert job.names is not None and job.life is not None, f"{job} releases nothing of anybody"
        peer, epoch = self.fleet.of(job.life), job.life.epoch
        tips = [name.tobytes() for name in job.names]

        def tell(client: Client) -> bool:
            for tip in tips:
                client.release(tip, epoch)
            return True

        self.fleet.ask([peer], lambda peer: peer.ask(tell), _ASK_SECONDS)
        return job.num_extents

    def _move(
        self, verb: Verb, number: int, job: MediumJob, indices: range
    ) -> Sequence[Checksums | Exception]:
        found: list[Checksums | Exception] = []
        while len(found) < len(indices):
            try:
                found += self._get_some(job, range(indices.start + len(found), indices.stop))
            except (BadExtentError, OSError) as error:
                found.append(error)
                break
        return found

    def _get_some(self, job: MediumJob, indices: range) -> list[Checksums]:
        """Seals of some leading ones of these extents, at least of one.

        Raises:
            BadExtentError: nobody has the first, or what came of it is wrong.
        """
        wrong: BadExtentError | None = None
        for peer in self._who(job, indices.start):
            try:
                found, has_lied = self._get_from(peer, job, indices)
            except OSError:
                continue  # it is known by now
            except AbsentError:
                continue
            if found:
                return found
            if has_lied:
                wrong = BrokenExtentError(f"the peer {peer.address.shown} has sent wrong bytes")
        raise wrong or AbsentError("no peer has it")

    def _who(self, job: MediumJob, index: int) -> list[Peer]:
        """Whom to ask for that extent, one after the other. Raises AbsentError."""
        if is_private(job.suffix):
            return []
        if job.life is not None:
            return [self.fleet.of(job.life)]
        assert job.names is not None
        peers = self.fleet.up(job.suffix)
        first = self._whereabouts.of(job.names[index].tobytes())
        if first in peers:
            return [first, *(peer for peer in peers if peer is not first)][:_MOST_ASKED]
        return peers[:_MOST_ASKED]

    def _get_from(self, peer: Peer, job: MediumJob, indices: range) -> tuple[list[Checksums], bool]:
        """Seals of leading extents that it has given, and whether something of the next one was wrong."""
        wanted, extents = _wanted(job, indices)
        began = self._clock()
        peer.count.gets += 1
        got: Got = peer.ask(lambda client: _get(peer, client, wanted))
        ends = np.cumsum([0, *wanted.counts])
        seals = [got.sums[ends[at] : ends[at + 1]] for at in range(got.num_right)]
        for at, index in enumerate(extents[: len(seals)]):
            expected = job.extent(index).seals
            if expected is not None and not np.array_equal(seals[at], expected):
                seals = seals[:at]
                break
        if got.num_extents:
            peer.judge(is_wrong=got.num_right < got.num_extents)
        has_lied = len(seals) < got.num_extents
        peer.count.misses += len(extents) - got.num_extents
        peer.count.nbytes += int(ends[len(seals)]) * self._pool.slot_bytes
        peer.count.seconds += self._clock() - began
        return seals, has_lied


def _get(peer: Peer, client: Client, wanted: Wanted) -> Got:
    near = peer.near(client)
    far = peer.far(client) if near is None else None
    if far is not None:
        try:
            got = client.get(wanted, far)
            if got.num_right == got.num_extents:
                peer.nixl_works()
                return got
            peer.give_up_nixl(NixlError("it has brought wrong bytes"))
        except NixlError as error:
            peer.give_up_nixl(error)
    return client.get(wanted, near)


def _wanted(job: MediumJob, indices: range) -> tuple[Wanted, range]:
    """What is asked for these extents, or as many leading ones as fit into a question."""
    assert job.names is not None
    counts = np.diff(job.starts)[indices.start : indices.stop]
    num_asked = int(np.searchsorted(np.cumsum(counts), MOST_SLOTS, side="right"))
    stop = indices.start + min(max(1, num_asked), len(indices), MOST_EXTENTS)
    skips = np.zeros(len(job.places), dtype=np.int64) if job.skips is None else job.skips
    part = slice(indices.start, stop)
    slots = job.slots[job.starts[indices.start] : job.starts[stop]]
    wanted = Wanted(
        job.names[part], counts[: stop - indices.start].tolist(), skips[part].tolist(), slots, job.suffix
    )
    return wanted, range(indices.start, stop)
