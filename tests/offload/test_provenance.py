"""Our version and the processor, as results name them."""

import platform
from importlib import metadata
from pathlib import Path

import pytest

from offload import provenance
from offload.provenance import cpu_model, own_version


def test_the_version_is_the_installed_one(monkeypatch: pytest.MonkeyPatch) -> None:
    assert own_version() == metadata.version("kv-offload")

    def not_there(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(provenance, "version", not_there)
    assert own_version() == "not installed"


def test_the_processor_is_the_one_that_linux_names(tmp_path: Path) -> None:
    file = tmp_path / "cpuinfo"
    assert cpu_model(file) in (platform.processor(), platform.machine())
    file.write_text("processor\t: 0\n")
    assert cpu_model(file) in (platform.processor(), platform.machine())
    file.write_text("processor\t: 0\nmodel name\t: Some CPU: fast @ 2 GHz\n")
    assert cpu_model(file) == "Some CPU: fast @ 2 GHz"
    assert cpu_model()
