"""Which of vLLM's modules this release touches, and a digest over their source.

The list is made from the import statements of this package, wherever they stand, so it cannot lag behind.
What a package of vLLM only passes on is followed to the module that defines it. Nothing is imported for that:
files are read.
"""

import ast
import hashlib
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import vllm

from offload.errors import UnsupportedError

_OURS = Path(__file__).parents[2]
_ALWAYS_THERE = "vllm.v1.core.sched.scheduler"

REACHED = (
    # called through objects that vLLM hands over, or calling ours
    "vllm.v1.core.block_pool",
    "vllm.v1.core.kv_cache_coordinator",
    "vllm.v1.core.kv_cache_planning",
    "vllm.v1.core.single_type_kv_cache_manager",
    "vllm.distributed.parallel_state",
    "vllm.config.aux_output",
    "vllm.config.model",
    "vllm.config.parallel",
    "vllm.plugins",
    "vllm.v1.utils",
    "vllm.platforms.cpu",
    "vllm.platforms.cuda",
    "vllm.platforms.interface",
    # played by the virtual engine
    "vllm.v1.engine.core",
    "vllm.v1.worker.gpu.kv_connector",
    "vllm.v1.worker.kv_connector_model_runner_mixin",
)
"""Modules behind the border that no import statement of ours names. Not all are in every vLLM."""


class _Name(NamedTuple):
    """What an import statement names: a module, and a name in it that may be a module itself."""

    module: str
    name: str | None


def border_modules() -> tuple[str, ...]:
    """Names of the modules, sorted; some may be missing in the vLLM at hand. Takes 0.2 s once per process."""
    return _modules_of(_OURS, Path(vllm.__path__[0]))


@lru_cache(maxsize=4)
def _modules_of(ours: Path, theirs: Path) -> tuple[str, ...]:
    """Those of this source of ours, with that source of vLLM."""
    found: set[str] = set(REACHED)
    for path in sorted(ours.rglob("*.py")):
        for _, imported in _imports(path, package=""):
            _follow(imported, found, theirs)
    return tuple(sorted(found))


def border_digest() -> str:
    """SHA-256 over the source of ``border_modules``, in hexadecimal; a module that is missing counts as such.

    Raises:
        UnsupportedError: a file that cannot be read, or a vLLM without its source.
    """
    if _file_of(_ALWAYS_THERE, Path(vllm.__path__[0])) is None:
        raise UnsupportedError(
            f"{_ALWAYS_THERE} has no source file in {vllm.__path__[0]}, so this vLLM cannot be told from "
            f"others; install one with its Python files"
        )
    digest = hashlib.sha256()
    for module in border_modules():
        path = _file_of(module, Path(vllm.__path__[0]))
        try:
            source = b"missing" if path is None else hashlib.sha256(path.read_bytes()).digest()
        except OSError as error:
            raise UnsupportedError(
                f"the source of {module} cannot be read ({error}); install vLLM anew"
            ) from None
        digest.update(module.encode() + b"\0" + source)
    return digest.hexdigest()


def _follow(imported: _Name, found: set[str], theirs: Path, seen: frozenset[_Name] = frozenset()) -> None:
    """Add the module that ``imported`` names, and the one that defines the name; ``seen``: on the way."""
    module, name = imported
    if name is not None and _file_of(f"{module}.{name}", theirs) is not None:
        found.add(f"{module}.{name}")
        return
    found.add(module)
    path = _file_of(module, theirs)
    if name is None or path is None or path.name != "__init__.py":
        return
    for bound, origin in _imports(path, package=module):
        if bound == name and origin != imported and origin not in seen:
            _follow(origin, found, theirs, seen | {imported})


def _imports(path: Path, package: str) -> Iterator[tuple[str, _Name]]:
    """Imports of vLLM in a file: the name bound there, and what it is. ``package``: of relative imports."""
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if _is_vllm(alias.name):
                    yield alias.asname or alias.name, _Name(alias.name, None)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            module = ".".join([*parents, *([node.module] if node.module else [])])
            if _is_vllm(module):
                for alias in node.names:
                    yield alias.asname or alias.name, _Name(module, alias.name)


def _is_vllm(module: str) -> bool:
    return module.partition(".")[0] == "vllm"


def _file_of(module: str, theirs: Path) -> Path | None:
    """The source of a module of vLLM, of which ``theirs`` is the folder."""
    path = theirs.joinpath(*module.split(".")[1:])
    for candidate in (path / "__init__.py", path.parent / f"{path.name}.py"):
        if candidate.is_file():
            return candidate
    return None
