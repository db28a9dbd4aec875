"""TLS on both sides: the certificate for clients, and the authorities for replicas.

Leaves handshakes to asyncio.

HTTP/1.1 is used on both sides of the proxy. A load balancer or Envoy in front can end HTTP/2.
"""

from __future__ import annotations

import asyncio
import re
import ssl
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

from gorgo.config.fleet import ReplicaConfig
from gorgo.config.model import TlsConfig
from gorgo.errors import ConfigError, InvalidValueError
from gorgo.live.logs import log

_NO_PASSWORD = "a private key without a passphrase"


@dataclass(slots=True)
class ServedTls:
    """TLS of a listener. A new certificate is loaded into the same context, so it needs no new socket."""

    context: ssl.SSLContext
    #: Key of the files in errors.
    place: str = "proxy.tls"
    #: Protocols that clients may negotiate.
    alpn: Sequence[str] = ("http/1.1",)
    #: File of the authorities that sign clients' certificates; `None` demands none of a client.
    client_ca: str | None = None
    #: When the first certificate of the loaded chain expires, s since 1970; `None` if it cannot be read.
    expires_s: float | None = field(default=None)

    def renew(self, files: TlsConfig) -> None:
        """Load the files anew, for handshakes from now on. Raises `ConfigError` and keeps the old pair."""
        if files.cert is None or files.key is None:
            return  # turning TLS off needs a restart
        fresh = _server_context(files.cert, files.key, self.place, self.alpn, self.client_ca)
        _load(self.place, self.context, files.cert, files.key)
        if self.client_ca is not None:
            _hand_on(self.context, fresh)
        self.expires_s = expiry_s(files.cert)


def served_tls(
    files: TlsConfig,
    *,
    place: str = "proxy.tls",
    alpn: Sequence[str] = ("http/1.1",),
    client_ca: str | None = None,
) -> ServedTls | None:
    """Return TLS of a listener, None without a certificate. Raises `ConfigError`.

    With `client_ca` the handshake of a client without a certificate of those authorities fails, and one of TLS 1.2.
    """
    if files.cert is None or files.key is None:
        return None
    context = _server_context(files.cert, files.key, place, alpn, client_ca)
    return ServedTls(context, place, alpn, client_ca, expiry_s(files.cert))


def trust_clients_of(context: ssl.SSLContext, client_ca: str, where: str) -> None:
    """Demand a certificate of clients that one of the file's authorities has signed. Raises `ConfigError`."""
    with _explained(where, f"client_ca {client_ca!r}", "certificates of authorities in PEM form"):
        _no_pipe(client_ca)
        context.load_verify_locations(client_ca)
        if not context.cert_store_stats()["x509_ca"]:
            raise ValueError("none of its certificates is an authority's")  # every client would be refused
    context.verify_mode = ssl.CERT_REQUIRED
    # A resumed session shows no certificate: it would outlive the authority that is taken away. Those of TLS 1.2 are in
    # OpenSSL's own cache too, which Python cannot turn off; of TLS 1.3 there are none without tickets.
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0


def _hand_on(context: ssl.SSLContext, fresh: ssl.SSLContext) -> None:
    """Let handshakes with `context` go on with `fresh`: an authority is never taken out of a context in use."""

    def switch(handshake: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        handshake.context = fresh

    context.sni_callback = switch


#: Between two looks at the files of a listener, s.
RENEW_S = 10.0


async def follow_files(served: ServedTls, files: Callable[[], TlsConfig]) -> None:
    """Load the files of a listener anew when they change, until cancelled: nobody tells of a renewed certificate.

    `files` returns those of the configuration in force.
    """
    now = files()
    watched = _PemFiles(now, served.client_ca)
    while True:
        await asyncio.sleep(RENEW_S)
        if files() != now:  # a reload has loaded the others
            now = files()
            watched = _PemFiles(now, served.client_ca)
        elif watched.have_changed():
            with suppress(ConfigError):  # replaced again meanwhile: the next look finds that
                served.renew(now)
            log("tls_renewed", cert=now.cert)


class _PemFiles:
    """Certificate, key and authorities on disk, and whether they have changed since they were last in use."""

    def __init__(self, files: TlsConfig, client_ca: str | None) -> None:
        assert files.cert is not None, "the listener has TLS"
        assert files.key is not None, "the listener has TLS"
        self._client_ca = client_ca
        self._paths = (Path(files.key), Path(files.cert), *(() if client_ca is None else (Path(client_ca),)))
        self._stamps = self._read_stamps()

    def have_changed(self) -> bool:
        """Return whether the files are another valid pair than before. A wrong pair is looked at again at each call."""
        try:
            stamps = self._read_stamps()
            if stamps == self._stamps:
                return False
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(self._paths[1], self._paths[0], password=b"")
            if self._client_ca is not None:
                trust_clients_of(context, self._client_ca, "")
        except (OSError, ValueError, ConfigError):  # half-written, or gone: the old pair stays
            return False
        self._stamps = stamps
        return True

    def _read_stamps(self) -> tuple[tuple[int, int], ...]:
        statuses = (path.stat() for path in self._paths)
        return tuple((each.st_mtime_ns, each.st_ino) for each in statuses)


#: A certificate in a file in PEM form (RFC 7468).
_PEM = re.compile("-----BEGIN CERTIFICATE-----.*?-----END CERTIFICATE-----", re.DOTALL)
#: Tags of DER: the version of a certificate, and its two forms of a time (RFC 5280, 4.1).
_VERSION, _UTC_TIME, _GENERALIZED_TIME = 0xA0, 0x17, 0x18


def expiry_s(cert: str) -> float | None:
    """Return when the first certificate of a chain in PEM form expires, s since 1970.

    `None` for a file that has none to read: the handshakes of clients tell more of it.
    """
    try:
        blocks = _PEM.findall(Path(cert).read_text(encoding="ascii", errors="replace"))
        return min(_not_after(ssl.PEM_cert_to_DER_cert(block)).timestamp() for block in blocks)
    except (OSError, ValueError, IndexError):
        return None


def _not_after(der: bytes) -> datetime:
    """Return the end of the validity of a certificate in DER (RFC 5280, 4.1). Raises `ValueError`, `IndexError`."""
    _, at, _ = _element(der, 0)  # Certificate
    _, at, _ = _element(der, at)  # TBSCertificate
    if der[at] == _VERSION:
        at = _element(der, at)[2]
    for _ in ("serialNumber", "signature", "issuer"):
        at = _element(der, at)[2]
    _, at, _ = _element(der, at)  # Validity
    at = _element(der, at)[2]  # notBefore
    tag, start, end = _element(der, at)
    form = {_UTC_TIME: "%y%m%d%H%M%SZ", _GENERALIZED_TIME: "%Y%m%d%H%M%SZ"}.get(tag)
    if form is None:
        raise ValueError("expected a time")
    return datetime.strptime(der[start:end].decode("ascii"), form).replace(tzinfo=UTC)


def _element(der: bytes, at: int) -> tuple[int, int, int]:
    """Return the tag of the element at a place, where its content begins, and where it ends."""
    tag, size, start = der[at], der[at + 1], at + 2
    if size & 0x80:
        start += size & 0x7F
        size = int.from_bytes(der[at + 2 : start])
    return tag, start, start + size


#: Makes the context of all replicas without files of their own, or returns the one that it made.
SharedTls = Callable[[], ssl.SSLContext]


def shared_tls(given: ssl.SSLContext | None = None) -> SharedTls:
    """Return the maker of `given`; by default of one that trusts the system's authorities, which take 30 ms to read."""
    return cache(ssl.create_default_context) if given is None else lambda: given


def upstream_tls(replica: ReplicaConfig, shared: SharedTls) -> ssl.SSLContext:
    """Return the context for one replica; that of `shared` if it has no files of its own. Raises `ConfigError`."""
    if replica.ca_file is None and replica.client_cert is None:
        return shared() if replica.url.lower().startswith("https:") else _trusting_none()
    where = f"replica {replica.name!r}"
    context = ssl.create_default_context() if replica.ca_file is None else _trusting(where, replica.ca_file)
    if replica.client_cert is not None and replica.client_key is not None:
        _load(where, context, replica.client_cert, replica.client_key)
    return context


def _server_context(cert: str, key: str, where: str, alpn: Sequence[str], client_ca: str | None) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # A renegotiation costs the server more than the client; OpenSSL 1.1.1 allows it by default.
    context.options |= ssl.OP_NO_RENEGOTIATION
    context.set_alpn_protocols(list(alpn))
    _load(where, context, cert, key)
    if client_ca is not None:
        trust_clients_of(context, client_ca, where)
    return context


@cache
def _trusting_none() -> ssl.SSLContext:
    """Return the context of connections that are not encrypted: a handshake with it fails."""
    return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


def _trusting(where: str, ca_file: str) -> ssl.SSLContext:
    """Trust the file's authorities alone: one of the system's could issue for any name inside the fleet."""
    with _explained(where, f"ca_file {ca_file!r}", "certificates of authorities in PEM form"):
        _no_pipe(ca_file)
        return ssl.create_default_context(cafile=ca_file)


def _load(where: str, context: ssl.SSLContext, cert: str, key: str) -> None:
    with _explained(where, f"{cert!r} with {key!r}", f"a certificate chain and {_NO_PASSWORD}, both in PEM form"):
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
def _explained(where: str, subject: str, expected: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as failure:  # `ssl.SSLError` is an `OSError`
        reason = getattr(failure, "strerror", None) or str(failure)
        raise InvalidValueError(where, f"{subject}: {reason}", expected) from failure
