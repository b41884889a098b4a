"""A real engine of a release that was not tested starts with a certificate, and says so once."""

from pathlib import Path

import pytest

from offload.vllm.certification.certificate import VARIABLE, identity_here, write_certificate
from tests.offload.vllm.overlay import NEWER, certificate_of, lay_over, run_with

pytestmark = pytest.mark.engine

ASK = """
from tests.engine.engine import Engine
engine = Engine({"cpu_gib": 0.0625})
prompt = list(range(5, 165))
print("answers", len(engine.ask([prompt, prompt])))
engine.close()
"""


def test_one_warning_however_many_processes(tmp_path: Path) -> None:
    file = tmp_path / "certificate.json"
    folder = lay_over(tmp_path / "next")
    write_certificate(certificate_of(identity_here()._replace(vllm=NEWER)), file)
    ran = run_with(folder, "-c", ASK, **{VARIABLE: str(file)})
    assert ran.returncode == 0, ran.stderr
    assert "answers 2" in ran.stdout
    said = ran.stdout + ran.stderr
    assert said.count(f"vLLM {NEWER} is not one that this release of kv-offload was tested with") == 1
    assert said.count(str(file)) == 1
