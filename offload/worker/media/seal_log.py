"""What lies in each place of a slab: its generation and its seals, in a log and in memory."""

import threading
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from offload.files.private import PrivateDirectory
from offload.files.reading import OpenDirectory
from offload.files.records import RecordLog, Records, read_records
from offload.messages import NAME_BYTES, PRIVATE, SUFFIX_BYTES, Ids, Names
from offload.worker.media.base import BadExtentError, Label
from offload.worker.media.slab_file import SlabShape
from offload.worker.seals import Checksums

SEALS = "seals"

_COLUMNS = ("place", "generation", "num_slots")
_NAMES = ("name", "parent", "suffix")
_PLAIN = 0
"""The codec of bytes that lie there as they were. There is no other yet."""
_NONE = 0
"""The generation of a place that holds nothing. Those of jobs are at least 1."""


class Kept(NamedTuple):
    """What a medium has kept from before: each place once, the highest places last.

    Attributes:
        places: ``int64[n]``.
        generations: of what lies there, ``int64[n]``.
        num_slots: of each extent, ``int64[n]``.
        names: of each, ``uint8[n, 32]``; see ``Label``.
        parents: the same.
        suffixes: the same, ``uint8[n, 16]``.
    """

    places: Ids
    generations: Ids
    num_slots: Ids
    names: Names
    parents: Names
    suffixes: Names


class SealLog:
    """A record for each extent that was put, appended after its bytes.

    After a crash a place holds what its record says, or it does not, and then the seals tell: no order of
    writing is needed for that. The newest generation of a place counts, wherever its record stands.

    Its methods may be called on any thread. None holds the lock of the table while it reads or writes a
    file, so a device that hangs keeps nobody from asking what lies where.
    """

    def __init__(
        self, directory: PrivateDirectory, shape: SlabShape, namespace: str, *, spare_records: int
    ) -> None:
        """Open the log and read all of it.

        Args:
            directory: where it is; owned.
            shape: of the slab.
            namespace: of its bytes; records of another one are not seen.
            spare_records: records beyond twice those that count, before the log is written anew.

        Raises:
            TierError: it cannot be had.
        """
        fields, identity = _fields(shape), _identity(shape, namespace)
        self._shape = shape
        self._spare_records = spare_records
        self._log = RecordLog(directory, SEALS, fields, identity)
        self._files = threading.Lock()
        self._table = threading.Lock()
        self._known = self._log.blank(shape.num_places)
        try:
            self.num_bad = self._recover()
            self._log.reserve(2 * shape.num_places + spare_records)
        except BaseException:
            self._log.close()
            raise

    def kept(self) -> Kept:
        """What lies where."""
        with self._table:
            known = self._known[self._known["generation"] != _NONE]
        columns = [np.ascontiguousarray(known[name]) for name in (*_COLUMNS, *_NAMES)]
        return Kept(*columns)

    @property
    def newest(self) -> int:
        """The highest generation of any place; 0 if there is none."""
        return int(self._newest.max(initial=_NONE))

    def seals_of(self, place: int, generation: int, skip: int, num_slots: int) -> Checksums:
        """Those of so many slots of an extent, behind those to be skipped.

        Raises:
            BadExtentError: it does not lie there, or has fewer.
        """
        with self._table:
            record = self._known[place].copy()
        if record["generation"] != generation:
            raise BadExtentError(f"place {place} holds generation {record['generation']}, not {generation}")
        if record["num_slots"] < skip + num_slots:
            raise BadExtentError(f"place {place} holds {record['num_slots']} slots, not {skip + num_slots}")
        sums: Checksums = record["sums"][skip : skip + num_slots]
        return sums

    def forget(self, place: int, generation: int) -> None:
        """Its bytes are about to change, for that generation.

        Raises:
            BadExtentError: there was as new a one before; a restart would find that instead.
        """
        with self._table:
            found = int(self._newest[place])
            if generation <= found:
                raise BadExtentError(
                    f"place {place} has had generation {found}, and {generation} is not newer"
                )
            self._newest[place] = generation
            self._known[place]["generation"] = _NONE

    def add(self, place: int, generation: int, seals: Checksums, label: Label) -> None:
        """An extent lies there now; known after a kill, too, when this returns. Raises TierError."""
        record = self._log.blank(1)
        record["place"], record["generation"], record["num_slots"] = place, generation, len(seals)
        record["sums"][0, : len(seals)] = seals
        record["codec"] = _PLAIN
        suffix = np.frombuffer(label.suffix, dtype=np.uint8)
        for field, value in zip(_NAMES, (label.name, label.parent, suffix), strict=True):
            if value is not None:
                record[field][0, : len(value)] = value
        with self._files:
            self._log.append(record)
            with self._table:
                self._known[place] = record[0]
            if self._log.num_records >= self._spare_records + 2 * self._shape.num_places:
                self._compact()

    def sync(self) -> None:
        """Bring all of it to the device. Raises TierError."""
        with self._files:
            self._log.sync()

    def close(self) -> None:
        """No thread may be at it. Calling it again does nothing."""
        self._log.close()

    def check_invariants(self) -> None:
        """What is known of a place is of that place, and the log has it."""
        with self._table:
            known = self._known.copy()
        assert (known["generation"] <= self._newest).all(), f"there are newer ones than {self._newest}"
        places = np.flatnonzero(known["generation"] != _NONE)
        assert (known["place"][places] == places).all(), f"records are of other places: {known[places]}"
        sizes = known["num_slots"][places]
        assert ((sizes >= 1) & (sizes <= self._shape.extent_slots)).all(), f"extents have {sizes} slots"
        assert len(places) <= self._log.num_records, f"{len(places)} of {self._log.num_records} records"

    def _recover(self) -> int:
        """Read the log; returns how many records are none."""
        records, num_bad = self._log.read()
        good = _of_places(records, self._shape)
        self._known[good["place"]] = good  # of several of one place the last stays
        self._newest = self._known["generation"].copy()
        self._known["generation"][_are_private(self._known)] = _NONE
        return num_bad + len(records) - len(good)

    def _compact(self) -> None:
        with self._table:
            live: Records = self._known[self._known["generation"] != _NONE]
        self._log.compact(live)
        self._log.reserve(2 * self._shape.num_places + self._spare_records)


def read_seals(directory: OpenDirectory, shape: SlabShape, namespace: str) -> Records:
    """Records of the extents that a log has, each place once, in their order. Its owner may go on with it.

    Raises:
        TierError: it cannot be read, or is not there.
    """
    records, _ = read_records(directory, SEALS, _fields(shape), _identity(shape, namespace))
    newest = _of_places(records, shape)[::-1]
    _, first = np.unique(newest["place"], return_index=True)
    newest = newest[first]
    kept: Records = newest[~_are_private(newest)]
    return kept


def _fields(shape: SlabShape) -> np.dtype[Any]:
    """Of a record."""
    return np.dtype(
        [
            *((name, "<i8") for name in (*_COLUMNS, "codec")),
            *((name, "u1", (NAME_BYTES,)) for name in _NAMES[:2]),
            (_NAMES[2], "u1", (SUFFIX_BYTES,)),
            ("sums", "<u8", (shape.extent_slots,)),
        ]
    )


def _identity(shape: SlabShape, namespace: str) -> str:
    return f"seals\n{shape.slot_bytes}\n{shape.extent_slots}\n{namespace}"


def _are_private(records: Records) -> npt.NDArray[np.bool_]:
    found: npt.NDArray[np.bool_] = records["suffix"][:, 0] == ord(PRIVATE)
    return found


def _of_places(records: Records, shape: SlabShape) -> Records:
    """Those that such a slab can have, the newest of each place behind its others."""
    places, sizes = records["place"], records["num_slots"]
    good = (places >= 0) & (places < shape.num_places) & (records["generation"] > _NONE)
    good &= (sizes >= 1) & (sizes <= shape.extent_slots) & (records["codec"] == _PLAIN)
    records = records[good]
    ordered: Records = records[np.argsort(records["generation"], kind="stable")]
    return ordered
