"""TLS contexts of a transport from TlsConfig: mutual, one authority for all peers.

The trap: peers are found by address, not by name, so a certificate of our authority is the whole proof (no host name check);
the key that a pull must present is the second one.
"""

import ssl
from dataclasses import dataclass

from prefill_plan.config import TlsConfig
from prefill_plan.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsContexts:
    server: ssl.SSLContext
    client: ssl.SSLContext


def load_contexts(config: TlsConfig) -> TlsContexts | None:
    """None when no file is named.

    Raises:
        ConfigError: some files are named and some not, or one cannot be used.
    """
    files = (config.certificate, config.key, config.authority)
    if not any(files):
        return None
    if not all(files):
        raise ConfigError(f"tls {files}: expected certificate, key and authority, or none of them")
    try:
        server = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=config.authority)
        server.verify_mode = ssl.CERT_REQUIRED
        client = ssl.create_default_context(ssl.Purpose.SERVER_AUTH, cafile=config.authority)
        client.check_hostname = False
        for context in (server, client):
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.load_cert_chain(config.certificate, config.key)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(f"tls {files}: {error}; expected PEM files of a mutual TLS") from error
    return TlsContexts(server=server, client=client)
