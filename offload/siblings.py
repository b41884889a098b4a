"""Whether the packages named ``evictor`` and ``allocator`` are those of this distribution.

PyPI has another ``allocator``. Python takes the first package of that name on its path, and pip lets two
distributions write into one folder (docs/decisions/0014).
"""

from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from typing import Any

_MARK = '__distribution__ = "kv-offload"'


def check_siblings() -> None:
    """Refuse packages of other distributions, before anything of them runs.

    Raises:
        ImportError: a package is missing, or it is not ours; the message names where it was found.
    """
    for name in ("evictor", "allocator"):
        spec = find_spec(name)
        if spec is None:
            raise ImportError(f"kv-offload lacks its package {name!r}; install kv-offload again", name=name)
        if _MARK not in _source(spec):
            place = spec.origin or str(list(spec.submodule_search_locations or ()))
            raise ImportError(
                f"the package {name!r} at {place} is not the one of kv-offload; another distribution, or a "
                f"folder on Python's path, has the same name. Use an environment without it, then install "
                f"kv-offload again",
                name=name,
                path=spec.origin,
            )


def _source(spec: ModuleSpec) -> str:
    """Of the package; empty if there is none, as of a folder without code."""
    loader: Any = spec.loader
    if hasattr(loader, "get_source"):  # also of a package in a zip file
        return loader.get_source(spec.name) or ""
    return Path(spec.origin).read_text() if spec.has_location and spec.origin else ""
