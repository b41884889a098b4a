"""A release that was not tested: it starts once it is certified, and one whose seam is another one fails.

Not among the tests that also run on the oldest and the newest vLLM: each starts a process with a vLLM of
its own.
"""

import json
import re
from pathlib import Path
from typing import NamedTuple

import pytest

from offload.vllm.certification.certificate import (
    VARIABLE,
    identity_here,
    read_certificate,
    write_certificate,
)
from tests.offload.vllm.overlay import NEWER, certificate_of, lay_over, run_with

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


class Said(NamedTuple):
    """What a command said, and its exit status."""

    status: int
    out: str
    err: str


def run_all(folder: Path, commands: list[list[str]], **variables: str) -> list[Said]:
    """Run ``kv-offload`` with the vLLM in ``folder`` and these environment variables."""
    ran = run_with(folder, "-c", COMMANDS, json.dumps(commands), **variables)
    lines = [line.removeprefix("###") for line in ran.stdout.splitlines() if line.startswith("###")]
    assert len(lines) == len(commands), ran.stderr
    return [Said(*json.loads(line)) for line in lines]


def test_the_next_release_starts_with_a_certificate(tmp_path: Path) -> None:
    """In the user's cache directory."""
    commands = [CHECK, ["certify", "--seconds", "0", "--seed", "8"], CHECK]
    variables = {VARIABLE: "", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    refused, certified, checked = run_all(lay_over(tmp_path / "next"), commands, **variables)
    assert refused.status == 1
    assert f"vLLM {NEWER} is not one" in refused.err
    assert "run `kv-offload certify`" in refused.err
    assert certified.status == 0, certified.err
    assert "starts without" not in certified.out
    assert checked.status == 0, checked.err
    assert f"vLLM     {NEWER}, not tested, but certified on" in checked.out
    [file] = (tmp_path / "cache" / "kv-offload").glob(f"vllm-{NEWER}-*.json")
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
    folder = lay_over(tmp_path / "next", {name: source})
    commands = [CHECK, ["certify", "--seconds", "0", "--seed", "0"], CHECK]
    stale, failed, still_stale = run_all(folder, commands, **{VARIABLE: str(file)})
    for said in (stale, still_stale):
        assert said.status == 1
        assert "is stale: digest is " in said.err
    assert failed.status == 1
    assert re.search(reason, failed.err), failed.err
    for words in (f"vllm: {NEWER}", "digest: ", "--seed ", "To report it", "no certificate was written"):
        assert words in failed.err
    assert read_certificate(file) == before


def test_a_release_that_hangs_fails(tmp_path: Path) -> None:
    """Nothing but the end of the process helps, so that comes, and says where it hung."""
    folder = lay_over(
        tmp_path / "next",
        {"v1/core/sched/scheduler.py": "def _wait(self):\n    while True: pass\nScheduler.schedule = _wait"},
    )
    file = tmp_path / "certificate.json"
    script = "import offload.vllm.certification.run as c, offload.cli as o; c.HANG_SECONDS = 5; "
    script += "o.main(['certify'])"
    ran = run_with(folder, "-c", script, **{VARIABLE: str(file)})
    assert ran.returncode == 1
    assert "Timeout" in ran.stderr and "most recent call first" in ran.stderr
    assert "with --seed" in ran.stdout
    assert not file.exists()
