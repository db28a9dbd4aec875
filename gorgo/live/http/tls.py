"""TLS on both sides: the certificate for clients, and the authorities for replicas.

Leaves handshakes to asyncio.

HTTP/1.1 is used on both sides of the proxy. A load balancer or Envoy in front can end HTTP/2.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from gorgo.config.fleet import ReplicaConfig
from gorgo.config.model import TlsConfig
from gorgo.errors import InvalidValueError

_NO_PASSWORD = "a private key without a passphrase"


@dataclass(frozen=True, slots=True)
class ServedTls:
    """TLS of a listener. A new certificate is loaded into the same context, so it needs no new socket."""

    context: ssl.SSLContext
    #: Key of the files in errors.
    place: str = "proxy.tls"
    #: Protocols that clients may negotiate.
    alpn: Sequence[str] = ("http/1.1",)

    def renew(self, files: TlsConfig) -> None:
        """Load the files anew, for handshakes from now on. Raises `ConfigError` and keeps the old pair."""
        if files.cert is None or files.key is None:
            return  # turning TLS off needs a restart
        _server_context(files.cert, files.key, self.place, self.alpn)
        _load(self.place, self.context, files.cert, files.key)


def served_tls(files: TlsConfig, *, place: str = "proxy.tls", alpn: Sequence[str] = ("http/1.1",)) -> ServedTls | None:
    """Return TLS of a listener, None without a certificate. Raises `ConfigError`."""
    if files.cert is None or files.key is None:
        return None
    return ServedTls(_server_context(files.cert, files.key, place, alpn), place, alpn)


#: Makes the context of all replicas without files of their own, or returns the one that it made.
SharedTls = Callable[[], ssl.SSLContext]


def shared_tls(given: ssl.SSLContext | None = None) -> SharedTls:
    """Return the maker of `given`; by default of one that trusts the system's authorities, which take 30 ms to read."""
    return cache(ssl.create_default_context) if given is None else lambda: given


def upstream_tls(replica: ReplicaConfig, shared: SharedTls) -> ssl.SSLContext:
    """Return the context for one replica; that of `shared` if it has no files of its own. Raises `ConfigError`."""
    if replica.ca_file is None and replica.client_cert is None:
        return shared() if replica.url.lower().startswith("https:") else _trusting_nobody()
    place = f"replica {replica.name!r}"
    context = ssl.create_default_context() if replica.ca_file is None else _trusting(place, replica.ca_file)
    if replica.client_cert is not None and replica.client_key is not None:
        _load(place, context, replica.client_cert, replica.client_key)
    return context


def _server_context(cert: str, key: str, place: str, alpn: Sequence[str]) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # A renegotiation costs the server more than the client; OpenSSL 1.1.1 allows it by default.
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(list(alpn))
    _load(place, context, cert, key)
    return context


@cache
def _trusting_nobody() -> ssl.SSLContext:
    """Return the context of connections that are not encrypted: a handshake with it fails."""
    return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


def _trusting(place: str, ca_file: str) -> ssl.SSLContext:
    """Trust the file's authorities alone: one of the system's could issue for any name inside the fleet."""
    with _explained(place, f"ca_file {ca_file!r}", "certificates of authorities in PEM form"):
        _no_pipe(ca_file)
        return ssl.create_default_context(cafile=ca_file)


def _load(place: str, context: ssl.SSLContext, cert: str, key: str) -> None:
    with _explained(place, f"{cert!r} with {key!r}", f"a certificate chain and {_NO_PASSWORD}, both in PEM form"):
        _no_pipe(cert, key)
        context.load_cert_chain(cert, key, password=_no_password)


def _no_pipe(*paths: str) -> None:
    """Raise for a pipe: OpenSSL would block the event loop until it is written to."""
    for path in paths:
        if Path(path).is_fifo():
            raise ValueError(f"{path!r} is a pipe")


def _no_password() -> str:
    # OpenSSL would otherwise prompt at the terminal.
    raise ValueError(_NO_PASSWORD)


@contextmanager
def _explained(place: str, subject: str, expected: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as failure:  # `ssl.SSLError` is an `OSError`
        reason = getattr(failure, "strerror", None) or str(failure)
        raise InvalidValueError(place, f"{subject}: {reason}", expected) from failure
