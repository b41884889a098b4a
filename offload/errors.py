"""Everything that is refused, before the engine starts or by the command.

    OffloadError (ValueError)
    ├── ConfigError            a key or value of kv_connector_extra_config
    ├── UnsupportedError       a model, an engine setting or a vLLM version this release cannot serve or count
    ├── HostMemoryError        the pool's memory cannot be had or pinned
    ├── TierError              files of a tier below the pool cannot be had, or are of others
    │   └── TierFormatError    they are damaged, or of a format that is not read
    ├── ProxyError             an option of kv-offload proxy, or an engine that it cannot have
    ├── OperatorError          an operator socket cannot be had, or does not answer as one
    └── TraceError             a file that is no trace of requests

At run time nothing is raised towards the engine: a fault there is a failed job, and that a cache miss.
"""


class OffloadError(ValueError):
    """Base of all errors of this package."""


class ConfigError(OffloadError):
    """A configuration key is unknown or its value is out of range; the message names both and the remedy."""


class UnsupportedError(OffloadError):
    """This model, engine setting or vLLM version cannot be served right; the message says what to do."""


class HostMemoryError(OffloadError):
    """The pool's memory cannot be mapped or pinned; the message names the limit and what raises it."""


class TierError(OffloadError):
    """Files of a tier cannot be had, or are not this engine's; the message names the path and what to do."""


class TierFormatError(TierError):
    """Files of a tier are damaged, or of a format that this release does not read; they can be deleted."""


class OperatorError(OffloadError):
    """An operator socket cannot be had, or nobody answers there as an engine does; the message says where."""


class ProxyError(OffloadError):
    """An option of ``kv-offload proxy`` is wrong; the message names its value and the remedy."""


class TraceError(OffloadError):
    """A line of a trace is not a request; the message names file, line and value."""


def without_vllm(missing: ModuleNotFoundError) -> OffloadError:
    """What to say where ``import vllm`` fails for want of a module."""
    if missing.name == "vllm":
        return OffloadError("vLLM is not installed here; install it, or run this where it is")
    return OffloadError(f"vLLM cannot be imported here ({missing}); install what it requires")
