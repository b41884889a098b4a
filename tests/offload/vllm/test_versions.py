"""Which vLLM may start: tested releases, newer ones with a certificate, older ones never."""

import json
import logging
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import vllm
from packaging.version import Version
from vllm.platforms import current_platform

from offload import ConfigError, UnsupportedError
from offload.provenance import own_version
from offload.vllm.certification.border import border_digest
from offload.vllm.certification.certificate import (
    VARIABLE,
    Certificate,
    Identity,
    certificate_path,
    identity_here,
    read_certificate,
    withdraw_certificate,
    write_certificate,
)
from offload.vllm.versions import TESTED, check_vllm_version, is_tested, on_trial, warn_if_certified
from tests.test_architecture import ROOT

UNTESTED = "0.34.0"

Say = Callable[[str], None]


@pytest.fixture
def say(monkeypatch: pytest.MonkeyPatch) -> Say:
    """Lets vLLM say that it is another version."""
    return lambda version: monkeypatch.setattr(vllm, "__version__", version)


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a certificate is looked for. There is none."""
    path = tmp_path / "kv-offload.json"
    monkeypatch.setenv(VARIABLE, str(path))
    return path


def certificate(**changes: str) -> Certificate:
    """One for what is here, but for these changes of its identity."""
    return Certificate(
        identity=identity_here()._replace(**changes),
        settings={"seconds": 60.0},
        seed=5,
        seeds=70,
        steps=23_000,
        checks=["all"],
        processor="some",
        date="2026-11-22T21:00:00+00:00",
    )


def refusal() -> str:
    with pytest.raises(UnsupportedError) as refused:
        check_vllm_version()
    return str(refused.value)


@pytest.mark.parametrize(
    ("script", "variable", "version"),
    [
        ("setup", "build=cuda vllm_version", TESTED[-1]),
        ("setup", "build=cpu vllm_version", TESTED[-2]),
        ("setup-oldest", "version", TESTED[0]),
        ("setup-newest", "version", TESTED[-1]),
    ],
)
def test_what_counts_as_tested_is_tested(script: str, variable: str, version: str) -> None:
    text = (ROOT / ".ci" / script).read_text()
    assert re.findall(rf"^ *{variable}=(\S+)", text, re.MULTILINE) == [version]


def test_tested_versions_are_in_order_and_the_extra_installs_the_newest() -> None:
    assert sorted(TESTED, key=Version) == list(TESTED)
    assert f'vllm = ["vllm=={TESTED[-1]}"]' in (ROOT / "pyproject.toml").read_text()


@pytest.mark.parametrize("version", [*TESTED, *(f"{each}+cpu" for each in TESTED), "0.33.0+cu129"])
def test_tested_releases_start_in_any_build(version: str, say: Say, file: Path) -> None:
    file.write_text("no certificate at all, which nobody looks at")
    say(version)
    assert is_tested()
    assert check_vllm_version() == (version, None, None)


@pytest.mark.parametrize(
    "version",
    [
        "0.34.0",
        "0.31.1",
        "0.32.1",
        "0.33.1",
        "0.33.0.post1",
        "0.33.1rc2+cpu",
        "0.34.0rc1",
        "0.33.0+precompiled",
        "0.33.1.dev12+gabcdef1",
        "0.33.0+d20261122",
        "0.32.0rc1",
        "0.33.0.dev3",
        "1.0.0",
        "0.100.0",
    ],
)
def test_any_other_release_needs_a_certificate(version: str, say: Say, file: Path) -> None:
    say(version)
    assert not is_tested()
    said = refusal()
    assert f"vLLM {version} is not one that this release of kv-offload was tested with" in said
    assert str(file) in said
    assert "run `kv-offload certify`" in said
    assert "install 0.31.0, 0.32.0 or 0.33.0" in said
    write_certificate(certificate(), file)
    assert check_vllm_version() == (version, certificate(), file)


@pytest.mark.parametrize(
    "version", ["0.30.4", "0.31.0rc1", "0.31.0.dev1", "0.1", "0.3.3", "unknown", "dev", ""]
)
def test_older_ones_never_start(version: str, say: Say, file: Path) -> None:
    say(version)
    write_certificate(certificate(), file)
    said = refusal()
    assert f"vLLM {version} is not supported by this release of kv-offload" in said
    assert "install 0.31.0, 0.32.0 or 0.33.0" in said
    assert "certify" not in said
    with on_trial():
        assert refusal() == said


@pytest.mark.parametrize("name", Identity._fields)
def test_a_certificate_for_anything_else_is_stale(name: str, say: Say, file: Path) -> None:
    say(UNTESTED)
    write_certificate(certificate(**{name: "other"}), file)
    said = refusal()
    here = getattr(identity_here(), name)
    assert f"the certificate {file} is stale: {name} is {here!r} here and 'other' there" in said
    assert "run `kv-offload certify` again" in said
    write_certificate(certificate(), file)
    assert check_vllm_version().certificate == certificate()


def test_it_is_for_exactly_what_is_here(say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    import platform

    import torch

    say(UNTESTED)
    digest = border_digest()
    assert identity_here() == (
        *(UNTESTED, torch.__version__, platform.python_version(), own_version()),
        *(current_platform.get_device_name(), digest),
    )
    monkeypatch.setattr(type(current_platform), "get_device_name", lambda *_: "NVIDIA H200")
    assert identity_here().device == "NVIDIA H200"


def test_stale_in_several_ways(say: Say, file: Path) -> None:
    say(UNTESTED)
    write_certificate(certificate(torch="2.1.0", device="NVIDIA H200"), file)
    assert "torch is " in refusal() and "and '2.1.0' there; device is " in refusal()


@pytest.mark.parametrize(
    "text",
    ["", "{", "[" * 100_000, "[]", "{}", '{"format": 1}', '{"format": 2}', '{"format": 1, "vllm": "0.34.0"}'],
    ids=lambda text: text[:40],
)
def test_what_is_no_certificate_is_refused(text: str, say: Say, file: Path) -> None:
    say(UNTESTED)
    file.write_text(text)
    said = refusal()
    assert f"the certificate {file} cannot be read" in said
    assert "run `kv-offload certify` again" in said


def test_one_with_other_keys_or_types_is_refused(say: Say, file: Path) -> None:
    say(UNTESTED)
    facts = json.loads(certificate().to_json())
    for changed in ({**facts, "more": 1}, {**facts, "torch": 2}, {**facts, "steps": "many"}):
        file.write_text(json.dumps(changed))
        assert "cannot be read" in refusal()
    file.write_bytes(b"\xff\xfe")
    assert "cannot be read" in refusal()


def test_one_that_may_not_be_read_is_refused(say: Say, file: Path) -> None:
    say(UNTESTED)
    file.mkdir()
    assert f"the certificate {file} cannot be read" in refusal()


def test_it_keeps_all_it_is_given() -> None:
    assert Certificate.from_json(certificate().to_json()) == certificate()
    facts: dict[str, Any] = json.loads(certificate().to_json())
    assert facts.keys() >= {*Identity._fields, "settings", "seed", "steps", "date"}


def test_writing_it_replaces_the_old_one_whole(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_certificate(certificate(), file)
    before = file.read_text()

    def fail(*_: object) -> None:
        raise OSError("no space")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", fail)
        with pytest.raises(OSError, match="no space"):
            write_certificate(certificate(torch="other"), file)
    assert file.read_text() == before
    assert [each.name for each in file.parent.iterdir()] == [file.name]
    write_certificate(certificate(torch="other"), file)
    assert '"other"' in file.read_text()
    assert [each.name for each in file.parent.iterdir()] == [file.name]


def test_where_it_is_looked_for(tmp_path: Path, say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    say(UNTESTED)
    monkeypatch.setattr(type(current_platform), "get_device_name", lambda *_: "cpu")
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    name = f"vllm-{UNTESTED}-cpu.json"
    assert certificate_path() == tmp_path / "kv-offload" / name
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for ignored in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        assert certificate_path() == tmp_path / "home" / ".cache" / "kv-offload" / name
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert certificate_path().parent == tmp_path / "home" / ".cache" / "kv-offload"
    monkeypatch.setenv(VARIABLE, "")
    assert certificate_path().parent == tmp_path / "home" / ".cache" / "kv-offload"
    monkeypatch.setenv(VARIABLE, "/opt/certificate.json")
    assert certificate_path() == Path("/opt/certificate.json")
    monkeypatch.setenv(VARIABLE, "~/certificate.json")
    assert certificate_path() == tmp_path / "home" / "certificate.json"


@pytest.mark.parametrize("named", ["certificate.json", "./c.json", "~nobody-of-that-name/c.json"])
def test_a_place_that_is_not_the_same_for_all_is_refused(named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, named)
    with pytest.raises(ConfigError, match=f"{VARIABLE} is '{named}'; give an absolute path"):
        certificate_path()


def test_devices_that_share_a_home_have_a_certificate_each(
    tmp_path: Path, say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    say(UNTESTED)
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    devices = ("cpu", "NVIDIA H200", "NVIDIA H100 80GB/PCIe")
    for device in devices:
        monkeypatch.setattr(type(current_platform), "get_device_name", lambda *_, device=device: device)
        write_certificate(certificate(), certificate_path())
    for device in devices:
        monkeypatch.setattr(type(current_platform), "get_device_name", lambda *_, device=device: device)
        assert check_vllm_version().certificate == certificate(device=device)
    assert sorted(file.name for file in (tmp_path / "kv-offload").iterdir()) == [
        f"vllm-{UNTESTED}-NVIDIA-H100-80GB-PCIe.json",
        f"vllm-{UNTESTED}-NVIDIA-H200.json",
        f"vllm-{UNTESTED}-cpu.json",
    ]


def test_a_link_is_followed(file: Path, tmp_path: Path) -> None:
    target = tmp_path / "volume" / "kept.json"
    file.symlink_to(target)
    for torch in ("1", "2"):
        write_certificate(certificate(torch=torch), file)
        assert file.is_symlink() and not target.is_symlink()
        assert read_certificate(target) == certificate(torch=torch)
    assert withdraw_certificate(file, identity_here()._replace(torch="2"))
    assert not target.exists()
    assert read_certificate(file) is None
    write_certificate(certificate(), file)
    assert read_certificate(target) == certificate()


def test_a_user_without_a_home(say: Say, monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere() -> Path:
        raise RuntimeError("Could not determine home directory.")

    say(UNTESTED)
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", nowhere)
    assert re.search(rf"vLLM {UNTESTED} needs a certificate.*set {VARIABLE} to a file", refusal())


def test_one_is_withdrawn_by_the_same_identity_alone(file: Path) -> None:
    assert not withdraw_certificate(file, identity_here())
    file.write_text("something else")
    assert not withdraw_certificate(file, identity_here())
    write_certificate(certificate(torch="other"), file)
    assert not withdraw_certificate(file, identity_here())
    assert file.exists()
    write_certificate(replace(certificate(), seed=6), file)
    assert withdraw_certificate(file, identity_here())
    assert not file.exists()


def test_a_release_on_trial_may_start(say: Say, file: Path) -> None:
    say(UNTESTED)
    with on_trial():
        assert check_vllm_version() == (UNTESTED, None, None)
    assert "certify" in refusal()


def test_the_warning_names_version_and_certificate(
    say: Say, file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    warn_if_certified()
    assert not caplog.messages
    say(UNTESTED)
    write_certificate(certificate(), file)
    warn_if_certified()
    [message] = caplog.messages
    assert f"vLLM {UNTESTED} is not one" in message
    assert f"the certificate {file} of 2026-11-22" in message
    assert "seed 5, 23000 steps" in message
