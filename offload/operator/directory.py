"""Where engines of one user have their operator sockets."""

import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

from offload.errors import OperatorError

SUFFIX = ".sock"
MOST_PATH_BYTES = 107
"""Of a unix socket's path; Linux has room for 108 with the NUL behind it."""
MOST_DIRECTORY_BYTES = MOST_PATH_BYTES - len("/.4194304-abcd.new")
"""Of a directory for sockets, whatever an engine's process id is."""


def runtime_directory(setting: str | None) -> Path:
    """The directory that is set, or the user's own: below ``XDG_RUNTIME_DIR``, else below the temp one."""
    if setting is not None:
        return Path(setting)
    base = os.environ.get("XDG_RUNTIME_DIR")
    if base and os.path.isabs(base) and _is_own(base):
        return Path(base, "kv-offload")
    return Path(tempfile.gettempdir(), f"kv-offload-{os.geteuid()}")


def make_private(directory: Path) -> None:
    """Make the directory if it is not there: 0700, and of this user.

    Raises:
        OperatorError: it is somebody else's, no directory, or cannot be made.
    """
    try:
        with suppress(FileExistsError):
            directory.mkdir(mode=0o700)
        found = directory.lstat()
        if not stat.S_ISDIR(found.st_mode):
            raise OperatorError(f"{directory} is no directory; remove it, or set operator_socket to another")
        if found.st_uid != os.geteuid():
            raise OperatorError(
                f"{directory} belongs to user {found.st_uid}; set operator_socket to a directory of this user"
            )
        if found.st_mode & 0o077:
            directory.chmod(0o700)
    except OSError as error:
        raise OperatorError(
            f"{directory}: {error.strerror or error}; set operator_socket to a directory in one that is there"
        ) from error


def sockets_in(directory: Path) -> list[Path]:
    """Paths of operator sockets, in order of names; whether anybody answers there is to be asked."""
    try:
        return sorted(path for path in directory.iterdir() if path.name.endswith(SUFFIX))
    except OSError:
        return []


def _is_own(path: str) -> bool:
    try:
        found = os.stat(path)
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid()
