"""``kv-offload certify``: on the vLLM at hand, on the next one, and on one whose seam is another."""

import json
import re
from pathlib import Path

import pytest
import torch
import vllm
from vllm.platforms import current_platform
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import KVCacheConfig

from offload.cli import main
from offload.layout import Region
from offload.vllm import certify, worker_side
from offload.vllm.certificate import (
    VARIABLE,
    Certificate,
    Identity,
    identity_here,
    read_certificate,
    write_certificate,
)
from offload.vllm.self_checks import THREADS, check_copies
from offload.vllm.versions import is_on_trial
from tests.offload.vllm.overlay import NEWER, lay_over, run_with

# Commands run one after another in a process whose vLLM is another one. What each said is a line of JSON.
COMMANDS = """
import contextlib, io, json, sys
from offload.cli import main
for arguments in json.loads(sys.argv[1]):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(arguments)
    print("###" + json.dumps([status, out.getvalue(), err.getvalue()]), flush=True)
"""

CHECK = ["check", "--config", '{"cpu_gib": 0.01}']


class Said:
    """What a command said, and its exit status."""

    def __init__(self, status: int, out: str, err: str) -> None:
        self.status, self.out, self.err = status, out, err


def run_all(folder: Path, commands: list[list[str]], file: Path) -> list[Said]:
    """Run ``kv-offload`` with the vLLM in ``folder``; ``file`` is the certificate's."""
    ran = run_with(folder, "-c", COMMANDS, json.dumps(commands), **{VARIABLE: str(file)})
    lines = [line.removeprefix("###") for line in ran.stdout.splitlines() if line.startswith("###")]
    assert len(lines) == len(commands), ran.stderr
    return [Said(*json.loads(line)) for line in lines]


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


def test_the_next_release_starts_with_a_certificate(tmp_path: Path) -> None:
    file = tmp_path / "certificate.json"
    commands = [CHECK, ["certify", "--seconds", "0", "--seed", "8"], CHECK]
    refused, certified, checked = run_all(lay_over(tmp_path / "next"), commands, file)
    assert refused.status == 1
    assert f"vLLM {NEWER} is not one" in refused.err
    assert "run `kv-offload certify`" in refused.err
    assert certified.status == 0, certified.err
    assert "starts without" not in certified.out
    assert checked.status == 0, checked.err
    assert f"vLLM     {NEWER}, not tested, but certified on" in checked.out
    assert str(file) in checked.out
    certificate = read_certificate(file)
    assert certificate is not None
    assert certificate.identity == identity_here()._replace(vllm=NEWER)


CHANGES = {
    # blocks that a failed load did not fill count as computed
    "failed loads": (
        "v1/core/sched/scheduler.py",
        "Scheduler._handle_invalid_blocks = lambda self, *arguments: set()",
        r"WrongBytesError: rank \d: r\d+, computing from token \d+, attends to wrong bytes",
    ),
    # 16 bytes in front of a cache
    "layout": (
        "v1/kv_cache_interface.py",
        "_views = create_kv_cache_views\n"
        "def create_kv_cache_views(raw, *arguments): return _views(raw[16:], *arguments)",
        "hold wrong bytes after a load",
    ),
    "a name that we import": (
        "v1/core/kv_cache_utils.py",
        "del get_request_block_hasher",
        "ImportError: cannot import name 'get_request_block_hasher'",
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_release_whose_seam_was_changed_fails(change: str, tmp_path: Path) -> None:
    """And the certificate for the same version without the change is stale."""
    name, source, reason = CHANGES[change]
    file = tmp_path / "certificate.json"
    before = certificate_of(identity_here()._replace(vllm=NEWER))
    write_certificate(before, file)
    commands = [CHECK, ["certify", "--seconds", "0", "--seed", "0"], CHECK]
    stale, failed, still_stale = run_all(lay_over(tmp_path / "next", {name: source}), commands, file)
    for said in (stale, still_stale):
        assert said.status == 1
        assert "is stale: digest is " in said.err
    assert failed.status == 1
    assert re.search(reason, failed.err), failed.err
    for words in (f"vllm: {NEWER}", "digest: ", "--seed 0", "To report it", "there is no certificate"):
        assert words in failed.err
    assert read_certificate(file) == before


def test_a_release_that_hangs_fails(tmp_path: Path) -> None:
    """Nothing but the end of the process helps, so that comes, and says where it hung."""
    folder = lay_over(
        tmp_path / "next",
        {"v1/core/sched/scheduler.py": "def _wait(self):\n    while True: pass\nScheduler.schedule = _wait"},
    )
    file = tmp_path / "certificate.json"
    script = "import offload.vllm.certify as c, offload.cli as o; c.HANG_SECONDS = 5; o.main(['certify'])"
    ran = run_with(folder, "-c", script, **{VARIABLE: str(file)})
    assert ran.returncode == 1
    assert "Timeout" in ran.stderr and "most recent call first" in ran.stderr
    assert "with --seed" in ran.stdout
    assert not file.exists()


def test_a_failure_withdraws_the_certificate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "certificate.json"
    write_certificate(certificate_of(identity_here()), file)
    monkeypatch.setattr(Scheduler, "_handle_invalid_blocks", lambda self, *arguments: set())
    assert main(["certify", "--seconds", "0", "--seed", "0", "--output", str(file)]) == 1
    assert not file.exists()
    assert "WrongBytesError" in capsys.readouterr().err
    assert not is_on_trial()


def test_a_region_that_is_not_where_vllm_has_it_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check of layouts sees an error of ours, too."""
    right = worker_side.block_regions

    def wrong(config: KVCacheConfig, base_address: int = 0) -> list[Region]:
        return right(config, base_address + 16)

    monkeypatch.setattr(worker_side, "block_regions", wrong)
    with pytest.raises(AssertionError):
        check_copies(torch.device("cpu"), THREADS, 0)


def certificate_of(identity: Identity) -> Certificate:
    return Certificate(
        identity=identity,
        settings={},
        seed=1,
        seeds=8,
        steps=9,
        processor="some",
        date="2026-11-22T21:00:00+00:00",
    )


@pytest.mark.parametrize("output", ["/proc/nowhere/certificate.json", "/"])
def test_where_nothing_can_be_written_nothing_is_run(output: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["certify", "--output", output]) == 1
    said = capsys.readouterr()
    assert f"refused: the certificate cannot be written to '{output}'" in said.err
    assert not said.out


def test_a_release_that_is_too_old_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(vllm, "__version__", "0.30.4")
    assert main(["certify", "--output", str(tmp_path / "c.json")]) == 1
    assert "refused: vLLM 0.30.4 is not supported" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
