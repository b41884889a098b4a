"""``kv-offload certify`` on the vLLM at hand, and on ours with a fault."""

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch
import vllm
from vllm.platforms import current_platform
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import KVCacheConfig

from offload.cli import main
from offload.testing import virtual
from offload.testing.self_checks import THREADS, check_copies
from offload.testing.virtual import RunReport
from offload.vllm import regions
from offload.vllm.certification import run as certify
from offload.vllm.certification.certificate import identity_here, read_certificate, write_certificate
from offload.vllm.versions import is_on_trial
from offload.worker.layout import Region
from tests.offload.vllm.overlay import certificate_of

ROOT = Path(__file__).parents[4]


def test_the_vllm_at_hand_is_certified(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """On every release that the tests run with. At least eight virtual engines run, whatever the time."""
    file = tmp_path / "below" / "certificate.json"
    assert main(["certify", "--seconds", "0", "--seed", "0", "--output", str(file)]) == 0
    certificate = read_certificate(file)
    assert certificate is not None
    assert certificate.identity == identity_here()
    assert (certificate.seed, certificate.seeds) == (0, certify.FEWEST_SEEDS)
    assert certificate.settings == {"seconds": 0.0, "turns": certify.TURNS}
    assert certificate.steps > certify.FEWEST_SEEDS * certify.TURNS
    said = capsys.readouterr().out
    assert all(check in said for check in certificate.checks)
    for words in (
        "seed         0",
        str(file),
        "no GPU kernel",
        "no real model ran",
        f"{certificate.steps:,} steps",
    ):
        assert words in said
    if not current_platform.is_cuda():
        assert "copies on a GPU: not measured" in said
    assert "starts without a certificate" in said
    assert f"set KV_OFFLOAD_CERTIFICATE={file}" in said


def test_a_failure_withdraws_the_certificate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also the one that the start would take, where another file was to be written."""
    file, usual = tmp_path / "certificate.json", tmp_path / "usual.json"
    monkeypatch.setenv("KV_OFFLOAD_CERTIFICATE", str(usual))
    write_certificate(certificate_of(identity_here()), file)
    write_certificate(certificate_of(identity_here()), usual)
    monkeypatch.setattr(Scheduler, "_handle_invalid_blocks", lambda self, *arguments: set())
    assert main(["certify", "--seconds", "0", "--seed", "0", "--output", str(file)]) == 1
    assert not file.exists() and not usual.exists()
    said = capsys.readouterr().err
    assert "WrongBytesError" in said
    assert all(f"The certificate of before is removed: {place}" in said for place in (file, usual))
    assert not is_on_trial()


class TestAFailure:
    """Of the third virtual engine, and nothing else runs."""

    @pytest.fixture(autouse=True)
    def _third_fails(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def run(seed: int, turns: int) -> RunReport:
            if seed == 7:
                raise AssertionError("wrong")
            return RunReport(seed, turns, 0.0, 0, Counter(loads=1))

        monkeypatch.setattr(virtual, "run_seed", run)
        monkeypatch.setattr(certify, "_self_checks", lambda seed: iter(()))

    def test_its_seed_is_the_one_to_repeat(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["certify", "--seconds", "0", "--seed", "5", "--output", str(tmp_path / "c.json")]) == 1
        said = capsys.readouterr()
        assert "command: kv-offload certify --seed 7\n" in said.err
        assert "AssertionError: wrong" in said.err
        assert "the maintainers of your copy of kv-offload" in said.err
        assert "is removed" not in said.err  # for there was none
        assert not list(tmp_path.iterdir())

    def test_a_certificate_that_cannot_be_removed_is_told(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def refused(path: Path, missing_ok: bool = False) -> None:
            raise PermissionError(13, "Permission denied")

        file = tmp_path / "c.json"
        write_certificate(certificate_of(identity_here()), file)
        monkeypatch.setattr(Path, "unlink", refused)
        assert main(["certify", "--seconds", "0", "--seed", "5", "--output", str(file)]) == 1
        said = capsys.readouterr().err
        assert f"Remove {file}, or the start accepts it: [Errno 13] Permission denied" in said
        assert "is removed" not in said


def test_a_region_that_is_not_where_vllm_has_it_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check of layouts sees an error of ours, too."""
    right = regions.block_regions

    def wrong(config: KVCacheConfig, base_address: int = 0) -> list[Region]:
        return right(config, base_address + 16)

    monkeypatch.setattr(regions, "block_regions", wrong)
    with pytest.raises(AssertionError, match=r"wrong bytes|changed its source|behind the cache"):
        check_copies(torch.device("cpu"), THREADS, 0)


@pytest.mark.parametrize("output", ["/proc/nowhere/certificate.json", "/"])
def test_where_nothing_can_be_written_nothing_is_run(output: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["certify", "--output", output]) == 1
    said = capsys.readouterr()
    assert f"refused: the certificate cannot be written to '{output}'" in said.err
    assert not said.out


def test_the_certificate_goes_where_a_shell_would_have_put_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "d.json").mkdir()
    assert main(["certify", "--output=~/d.json"]) == 1
    assert f"cannot be written to '{tmp_path}/d.json' (it is a directory)" in capsys.readouterr().err
    monkeypatch.chdir(tmp_path)
    assert main(["certify", "--output", "d.json"]) == 1
    assert f"cannot be written to '{tmp_path}/d.json' (it is a directory)" in capsys.readouterr().err


def test_a_release_that_is_too_old_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(vllm, "__version__", "0.30.4")
    assert main(["certify", "--output", str(tmp_path / "c.json")]) == 1
    assert "refused: vLLM 0.30.4 is not supported" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_where_vllm_finds_no_device_it_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As with a CUDA build in an image that is made where there is no GPU."""

    def no_device(device_id: int = 0) -> str:
        raise NotImplementedError

    monkeypatch.setattr(current_platform, "get_device_name", no_device)
    assert main(["certify", "--output", str(tmp_path / "c.json")]) == 1
    assert "refused: vLLM finds no device here" in capsys.readouterr().err


def test_without_assertions_nothing_is_certified(tmp_path: Path) -> None:
    """They are what finds wrong bytes."""
    command = [sys.executable, "-O", "-c", "import sys; from offload.cli import main; sys.exit(main())"]
    file = tmp_path / "c.json"
    ended = subprocess.run(
        [*command, "certify", "--output", str(file)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert ended.returncode == 1 and "python -O and PYTHONOPTIMIZE" in ended.stderr
    assert not file.exists()


@pytest.mark.parametrize(
    ("option", "value", "remedy"),
    [
        ("--seconds", "-1", "'-1' is no time; give seconds, 0 or more"),
        ("--seconds", "x", "'x' is no time"),
        ("--seconds", "nan", "'nan' is no time"),
        ("--seed", "x", "'x' is no seed; give a whole number"),
        ("--seed", "-2", "'-2' is no seed"),
    ],
)
def test_a_wrong_argument_is_named(
    option: str, value: str, remedy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["certify", f"{option}={value}"])
    assert remedy in capsys.readouterr().err
