"""Every benchmark says what it can be asked for."""

from importlib import import_module
from pathlib import Path

import pytest

import benchmarks

FOLDER = Path(benchmarks.__file__).parent
NAMES = sorted(main.parent.name for main in FOLDER.glob("*/__main__.py"))


def test_there_are_benchmarks() -> None:
    assert {"answers", "long_document_qa"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        import_module(f"benchmarks.{name}.__main__").main(["--help"])
    assert end.value.code == 0
    told = capsys.readouterr().out
    assert told.startswith(f"usage: python -m benchmarks.{name}")
    assert "--json FILE" in told
    assert f"\n    python -m benchmarks.{name}" in told, "the docstring shows how it is run"
