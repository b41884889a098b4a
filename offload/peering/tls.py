"""TLS between peers: both sides have a certificate of the fleet's own authority."""

import ssl

from offload.errors import ConfigError
from offload.fleet_config import TlsFiles


def server_context(files: TlsFiles) -> ssl.SSLContext:
    """Of whoever is called. Raises ConfigError: a file is not as it must be."""
    return _context(ssl.PROTOCOL_TLS_SERVER, files)


def client_context(files: TlsFiles) -> ssl.SSLContext:
    """Of whoever calls. Raises ConfigError: a file is not as it must be.

    A certificate of the fleet's authority is enough: engines are found by addresses, which change.
    """
    return _context(ssl.PROTOCOL_TLS_CLIENT, files)


def _context(protocol: int, files: TlsFiles) -> ssl.SSLContext:
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    try:
        context.load_cert_chain(files.cert_file, files.key_file, password=_refuse_password)
    except (OSError, ssl.SSLError, ValueError) as error:
        raise ConfigError(
            f"fleet_tls: {files.cert_file} and {files.key_file} cannot be used ({error}); give a certificate "
            f"in PEM and its private key, without a password"
        ) from error
    try:
        context.load_verify_locations(files.ca_file)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"fleet_tls: ca_file {files.ca_file} cannot be used ({error}); give certificates in PEM"
        ) from error
    return context


def _refuse_password() -> str:
    raise ValueError("the key has a password")
