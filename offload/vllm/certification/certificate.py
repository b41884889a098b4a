"""Certificates: that ``kv-offload certify`` ran well with exactly this vLLM on such a device."""

import json
import os
import platform
import re
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import vllm

from offload.errors import ConfigError, UnsupportedError
from offload.provenance import own_version
from offload.vllm.certification.border import border_digest

VARIABLE = "KV_OFFLOAD_CERTIFICATE"
"""Names the certificate's file instead of the user's cache directory, to write it and to find it."""

COMMAND = "kv-offload certify"
_FORMAT = 1
_KINDS = {"settings": dict, "seed": int, "seeds": int, "steps": int, "checks": list}
"""Types of what is no text."""


class Identity(NamedTuple):
    """What a certificate is for. With anything else it is stale.

    Attributes:
        vllm: exact version, the build included.
        torch: the same of torch.
        python: the same of Python.
        kv_offload: the same of this package.
        device: "cpu", or the GPU's model.
        digest: over the source of vLLM's modules at the border, see ``border``.
    """

    vllm: str
    torch: str
    python: str
    kv_offload: str
    device: str
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Certificate:
    """An identity, and what was run with it.

    Attributes:
        identity: what it is for.
        settings: of the run, such as its seconds.
        seed: of the first virtual engine; the others follow.
        seeds: number of virtual engines.
        steps: of vLLM's scheduler, all engines together.
        checks: what was checked, in words.
        processor: what the run was on, for the reader.
        date: when it ended, in UTC as ISO 8601.
    """

    identity: Identity
    settings: dict[str, Any]
    seed: int
    seeds: int
    steps: int
    checks: list[str] = field(default_factory=list)
    processor: str
    date: str

    def to_json(self) -> str:
        """As it is kept."""
        facts = {"format": _FORMAT, **self.identity._asdict(), **asdict(self)}
        del facts["identity"]
        return json.dumps(facts, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str) -> "Certificate":
        """Read what ``to_json`` wrote. ValueError with the reason for anything else."""
        facts = json.loads(text)
        if not isinstance(facts, dict) or facts.pop("format", None) != _FORMAT:
            raise ValueError(f'it is no JSON object with "format": {_FORMAT}')
        try:
            identity = Identity(**{name: facts.pop(name) for name in Identity._fields})
            certificate = cls(identity=identity, **facts)
        except (KeyError, TypeError) as error:
            raise ValueError(f"keys are missing or unknown: {error}") from None
        for name, value in {**identity._asdict(), **facts}.items():
            if not isinstance(value, _KINDS.get(name, str)):
                raise ValueError(f"{name} is {value!r:.100}, of the wrong type")
        return certificate


def identity_here() -> Identity:
    """The identity of this process. About 0.1 s; reads files, and starts nothing on a GPU.

    Raises:
        UnsupportedError: vLLM's source cannot be read, or there is no device that it runs on.
    """
    import torch

    return Identity(
        str(vllm.__version__),
        str(torch.__version__),
        platform.python_version(),
        own_version(),
        _device(),
        border_digest(),
    )


def certificate_path() -> Path:
    """Where the certificate for this version of vLLM on this kind of device is, or is to be.

    Raises:
        ConfigError: the variable names no place that is the same in every process.
        UnsupportedError: there is no home directory, and nothing says where to look instead.
    """
    named = os.environ.get(VARIABLE)
    if named:
        return _named_path(named)
    cache = os.environ.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(cache):  # the XDG specification has others ignored
        try:
            cache = str(Path.home() / ".cache")
        except RuntimeError:
            raise UnsupportedError(
                f"vLLM {vllm.__version__} needs a certificate, and this user has no home directory to "
                f"keep it in; set {VARIABLE} to a file, which `{COMMAND}` then writes"
            ) from None
    # Machines with other devices may share the directory.
    name = re.sub(r"[^\w.+-]+", "-", f"vllm-{vllm.__version__}-{_device()}")
    return Path(cache, "kv-offload", f"{name}.json")


def _named_path(named: str) -> Path:
    with suppress(RuntimeError):  # no such home: the path stays as it is
        path = Path(named).expanduser()
        if path.is_absolute():
            return path
    raise ConfigError(
        f"{VARIABLE} is {named!r}; give an absolute path, since each process of the engine looks there, "
        f"whatever its working directory"
    )


def _device() -> str:
    from vllm.platforms import current_platform

    try:
        return str(current_platform.get_device_name())
    except Exception as error:  # of the platform's own library
        raise UnsupportedError(
            f"vLLM finds no device here ({error!r}); run this where the GPU is that will serve"
        ) from None


def read_certificate(path: Path) -> Certificate | None:
    """The certificate in that file; None if there is no such file.

    Raises:
        UnsupportedError: the file cannot be read, or holds no certificate.
    """
    try:
        return Certificate.from_json(path.read_text())
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise UnsupportedError(
            f"the certificate {path} cannot be read ({error}); run `{COMMAND}` again, or set {VARIABLE} to "
            f"another file"
        ) from None


def differences(certificate: Certificate, here: Identity) -> str:
    """How an identity differs from the certificate's, in words; nothing if it does not."""
    pairs = zip(Identity._fields, certificate.identity, here, strict=True)
    return "; ".join(f"{name} is {ours!r} here and {its!r} there" for name, its, ours in pairs if its != ours)


def write_certificate(certificate: Certificate, path: Path) -> None:
    """Write it, whole or not at all, in place of what is there. Makes the directory. Follows a link.

    Raises:
        OSError: that is not possible.
    """
    path = Path(os.path.realpath(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        new.write_text(certificate.to_json())
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)


def withdraw_certificate(path: Path, identity: Identity) -> bool:
    """Remove a certificate that a later run with the same identity has refuted. Leaves other files alone.

    Returns whether there was one. A link to it stays, and leads nowhere.

    Raises:
        OSError: it is there, and cannot be removed.
    """
    try:
        certificate = read_certificate(path)
    except UnsupportedError:
        return False
    if certificate is None or certificate.identity != identity:
        return False
    Path(os.path.realpath(path)).unlink(missing_ok=True)
    return True
