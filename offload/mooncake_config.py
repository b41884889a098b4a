"""What the user says of a Mooncake Store, checked before anything is built."""

from dataclasses import dataclass

from offload.errors import ConfigError
from offload.settings import Admit, check_wait_seconds, read_admit
from offload.store_config import check_path, read_name_key

MOONCAKE = "mooncake"

_PROTOCOLS = ("tcp", "rdma")
_REMEDY = 'give "host:port", such as "10.0.0.5:50051"'


@dataclass(frozen=True, slots=True, kw_only=True)
class MooncakeConfig:
    """A Mooncake Store that engines share. Keys are called as in the file that MOONCAKE_CONFIG_PATH names.

    An engine brings no memory to the store: other processes do, such as ``mooncake_client``.

    Attributes:
        master_server_address: where the master listens.
        metadata_server: that clients find each other by; ``P2PHANDSHAKE``: they need none.
        protocol: ``tcp`` or ``rdma``.
        device_name: RDMA devices, separated by commas; empty: Mooncake finds them.
        local_hostname: how others reach this host; None: the address that reaches the master.
        tenant_id: in whose name, where the master knows several.
        admit: what is written: ``Admit.ALL`` or ``Admit.SECOND_USE``.
        wait_seconds: a request waits for the store's answers that long at most, from its first question on.
        name_key_file: has a secret that names are keyed with.

    Raises:
        ConfigError: a value of the wrong type or out of range.
    """

    master_server_address: str
    metadata_server: str = "P2PHANDSHAKE"
    protocol: str = "tcp"
    device_name: str = ""
    local_hostname: str | None = None
    tenant_id: str = "default"
    admit: Admit = Admit.ALL
    wait_seconds: float = 0.02
    name_key_file: str | None = None

    def __post_init__(self) -> None:
        _host_and_port(self.master_server_address)
        for name in ("metadata_server", "device_name", "local_hostname", "tenant_id"):
            value = getattr(self, name)
            is_empty = value == "" and name != "device_name"
            if (value is not None or name != "local_hostname") and (not isinstance(value, str) or is_empty):
                raise ConfigError(f"{name} of a mooncake tier is {value!r}; give a string, or leave it out")
        if self.protocol not in _PROTOCOLS:
            raise ConfigError(f'protocol of a mooncake tier is {self.protocol!r}; use "tcp" or "rdma"')
        object.__setattr__(self, "admit", read_admit(self.admit))
        check_wait_seconds("a store", self.wait_seconds)
        check_path("name_key_file", self.name_key_file)

    @property
    def kind(self) -> str:
        """As in the configuration."""
        return MOONCAKE

    @property
    def master(self) -> tuple[str, int]:
        """Host and port."""
        return _host_and_port(self.master_server_address)

    @property
    def name_key(self) -> bytes | None:
        """The secret that names are keyed with.

        Raises:
            ConfigError: its file cannot be read, or is too short to be one.
        """
        return read_name_key(self.name_key_file)

    @property
    def shown(self) -> str:
        """Where the master listens."""
        return self.master_server_address

    def __str__(self) -> str:
        """Its kind and address."""
        return f"{MOONCAKE} at {self.shown}"


def _host_and_port(address: object) -> tuple[str, int]:
    if isinstance(address, str):
        host, _, port = address.rpartition(":")
        is_port = port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16
        if host and is_port and "/" not in host:
            return host.strip("[]"), int(port)
    raise ConfigError(f"master_server_address of a mooncake tier is {address!r}; {_REMEDY}")
