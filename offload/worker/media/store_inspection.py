"""What a store has of ours, seen from outside: it scans, which no engine does."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from offload.errors import TierError
from offload.messages import PRIVATE
from offload.worker.media.resp import Connection, Reply, StoreError
from offload.worker.media.store_keeper import ABOUT
from offload.worker.media.store_names import KEY_PREFIX, namespace_key
from offload.worker.media.store_value import is_whole

_SCAN_COUNT = b"1000"
_BATCH = 200


@dataclass(slots=True)
class StoredNamespace:
    """What engines with the same model and configuration have in a store.

    Attributes:
        name: 16 digits, the digest of what must be equal.
        ranks: digests of ranks that have something there.
        num_extents: of all ranks.
        num_private: of these, extents of engines that were reset, which no other engine finds.
        num_bytes: of all values.
    """

    name: str
    ranks: set[str] = field(default_factory=set)
    num_extents: int = 0
    num_private: int = 0
    num_bytes: int = 0


def look_into(connection: Connection) -> list[StoredNamespace]:
    """What there is of each namespace, by name. O(keys of the store)."""
    found: dict[str, StoredNamespace] = {}
    for keys in _scan(connection):
        for key, size in zip(keys, _ask(connection, b"STRLEN", keys), strict=True):
            name, rank, is_private = _parts(key)
            namespace = found.setdefault(name, StoredNamespace(name))
            namespace.ranks.add(rank)
            namespace.num_extents += 1
            namespace.num_private += is_private
            namespace.num_bytes += size if isinstance(size, int) else 0
    return [found[name] for name in sorted(found)]


def verify(connection: Connection, names: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Read all extents of these namespaces, all if none is named: how many there are, and are not whole."""
    found = dict.fromkeys(names, (0, 0))
    for keys in _scan(connection):
        for key in keys:
            name = _parts(key)[0]
            if names and name not in names:
                continue
            try:
                value = connection.call(b"GET", key)
            except StoreError:  # of another type
                value = b""
            if value is None:  # it has expired meanwhile
                continue
            num_extents, num_broken = found.get(name, (0, 0))
            is_broken = not (isinstance(value, bytes) and is_whole(value))
            found[name] = (num_extents + 1, num_broken + is_broken)
    return found


def delete(connection: Connection, names: Sequence[str], *, private_only: bool = False) -> int:
    """Delete the extents of these namespaces, of all if there are none. Returns how many."""
    num_deleted = 0
    for keys in _scan(connection):
        chosen = [
            key
            for key in keys
            for name, _, is_private in [_parts(key)]
            if (not names or name in names) and (is_private or not private_only)
        ]
        num_deleted += sum(each for each in _ask(connection, b"UNLINK", chosen) if isinstance(each, int))
    if not private_only:
        about = [namespace_key(name.encode()) for name in names] or list(_keys(connection, _is_about))
        deque(_ask(connection, b"UNLINK", about), maxlen=0)
    return num_deleted


def check_names(found: Sequence[StoredNamespace], names: Sequence[str]) -> None:
    """Refuse names that a store does not have.

    Raises:
        TierError: there is none of that name.
    """
    known = [each.name for each in found]
    for name in names:
        if name not in known:
            raise TierError(f"{name!r} is no namespace there; there are: {', '.join(known) or 'none'}")


def _is_extent(key: bytes) -> bool:
    return key.count(b":") >= 3


def _is_about(key: bytes) -> bool:
    return key.startswith(ABOUT)


def _keys(connection: Connection, is_meant: Callable[[bytes], bool]) -> Iterator[bytes]:
    for batch in _scan(connection, is_meant):
        yield from batch


def _scan(connection: Connection, is_meant: Callable[[bytes], bool] = _is_extent) -> Iterator[list[bytes]]:
    """Keys of ours, in batches, none twice."""
    cursor: Reply = b"0"
    seen = set[bytes]()
    while True:
        assert isinstance(cursor, bytes)
        found = connection.call(b"SCAN", cursor, b"MATCH", KEY_PREFIX + b"*", b"COUNT", _SCAN_COUNT)
        if not isinstance(found, list) or len(found) != 2 or not isinstance(found[1], list):
            raise TierError(f"the store answers SCAN with {found!r:.100}")
        cursor, keys = found[0], found[1]
        fresh = [key for key in keys if isinstance(key, bytes) and is_meant(key) and key not in seen]
        seen.update(fresh)
        yield list(dict.fromkeys(fresh))
        if cursor == b"0":
            return


def _ask(connection: Connection, command: bytes, keys: Sequence[bytes]) -> Iterator[Reply]:
    for start in range(0, len(keys), _BATCH):
        batch = keys[start : start + _BATCH]
        connection.send([(command, key) for key in batch])
        for _ in batch:
            try:
                yield connection.reply()
            except StoreError:  # of another type
                yield None


def _parts(key: bytes) -> tuple[str, str, bool]:
    """Namespace, rank, and whether it is private."""
    _, name, rank, *rest = key.decode(errors="replace").split(":")
    return name, rank, len(rest) > 1 and rest[1].startswith(PRIVATE.hex())
