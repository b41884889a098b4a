"""The list of vLLM's modules at the border has all that we import, call and are called by."""

import importlib
import pkgutil
import sys
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import pytest
import vllm

import offload
from offload.errors import UnsupportedError
from offload.testing.virtual import run_seed
from offload.vllm.certification import border
from offload.vllm.certification.border import REACHED, border_digest, border_modules
from tests.offload.vllm.overlay import HERE, lay_over

NOT_EVERYWHERE = {
    "vllm.config.aux_output",
    "vllm.entrypoints.common.cli_args",
    "vllm.entrypoints.launchers.cli_args",
    "vllm.v1.core.kv_cache_planning",
    "vllm.v1.metrics.cache_hit_source",
}
"""Modules that some supported vLLM lacks."""


def our_modules() -> list[ModuleType]:
    found = pkgutil.walk_packages(offload.__path__, "offload.")
    return [importlib.import_module(each.name) for each in found]


def test_what_our_modules_hold_of_vllm_comes_from_listed_ones() -> None:
    """By what is there once they are imported, not by their source."""
    listed, seen = set(border_modules()), set()
    for module in our_modules():
        for value in vars(module).values():
            home = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
            if isinstance(home, str) and home.partition(".")[0] == "vllm":
                seen.add(home)
    assert "vllm.config.vllm" in seen, "a class that its package passes on"
    assert seen <= listed | {"vllm"}, f"not listed: {sorted(seen - listed)}"


def test_what_calls_us_or_is_called_by_us_is_listed() -> None:
    """As a run of the virtual engine shows: modules of vLLM one call away from ours."""
    met: set[str] = set()

    def look(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_back is not None:
            pair = [str(each.f_globals.get("__name__", "")) for each in (frame.f_back, frame)]
            tops = {each.partition(".")[0]: each for each in pair}
            if tops.keys() == {"vllm", "offload"}:
                met.add(tops["vllm"])

    sys.setprofile(look)
    try:
        for seed in range(2):
            run_seed(seed, turns=40)
    finally:
        sys.setprofile(None)
    assert "vllm.v1.core.block_pool" in met, "it is called through the scheduler's own object"
    assert met <= set(border_modules()), f"not listed: {sorted(met - set(border_modules()))}"


@pytest.mark.parametrize(
    "module",
    [
        "vllm.v1.core.sched.scheduler",  # driven
        "vllm.v1.core.kv_cache_manager",  # named for type checkers only
        "vllm.v1.kv_offload.cpu.swap_blocks_triton",  # imported in a function
        "vllm.config.kv_transfer",  # its package passes it on, with a relative import or not
        "vllm.engine.arg_utils",  # wrapped
        "vllm._custom_ops",
        *REACHED,
    ],
)
def test_it_is_listed(module: str) -> None:
    assert module in border_modules()


def test_listed_modules_are_there() -> None:
    missing = {module for module in border_modules() if border._file_of(module, HERE) is None}
    assert missing <= NOT_EVERYWHERE


@pytest.mark.parametrize(
    ("line", "module"),
    [
        ("import vllm.connections", "vllm.connections"),
        ("def load():\n    from vllm.connections import HTTPConnection", "vllm.connections"),
        ("from vllm import connections", "vllm.connections"),
        ("from vllm.config import LoRAConfig", "vllm.config.lora"),
        ("try:\n    import vllm.nowhere\nexcept ImportError:\n    pass", "vllm.nowhere"),
    ],
)
def test_a_new_import_is_listed(
    line: str, module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "new" / "below").mkdir(parents=True)
    (tmp_path / "new" / "below" / "new.py").write_text(line + "\n")
    monkeypatch.setattr(border, "_OURS", tmp_path / "empty")
    modules, digest = border_modules(), border_digest()
    monkeypatch.setattr(border, "_OURS", tmp_path / "new")
    assert module in set(border_modules()) - set(modules)
    assert border_digest() != digest


@pytest.mark.parametrize(
    ("name", "is_seen"),
    [
        ("v1/core/sched/scheduler.py", True),
        ("config/vllm.py", True),
        ("v1/core/block_pool.py", True),
        ("connections.py", False),
    ],
)
def test_the_digest_is_of_the_source(
    name: str, is_seen: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = border_digest()
    folder = lay_over(tmp_path, {name: "# a change"})
    monkeypatch.setattr(vllm, "__path__", [str(folder / "vllm")])
    assert (border_digest() != before) == is_seen
    assert (folder / "vllm" / name).read_bytes() != (HERE / name).read_bytes()


def test_a_module_that_goes_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = lay_over(tmp_path, {"multimodal/inputs.py": ""})
    (folder / "vllm" / "multimodal" / "inputs.py").unlink()
    before = border_digest()
    monkeypatch.setattr(vllm, "__path__", [str(folder / "vllm")])
    assert border_digest() != before


def test_a_vllm_without_its_source_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm, "__path__", [str(tmp_path)])
    with pytest.raises(UnsupportedError, match=f"has no source file in {tmp_path}"):
        border_digest()


def test_packages_that_import_a_name_from_each_other_are_both_listed(tmp_path: Path) -> None:
    for package, other in (("a", "b"), ("b", "a")):
        (tmp_path / package).mkdir()
        (tmp_path / package / "__init__.py").write_text(f"from vllm.{other} import Name")
    found: set[str] = set()
    border._follow(border._Name("vllm.a", "Name"), found, tmp_path)
    assert found == {"vllm.a", "vllm.b"}
