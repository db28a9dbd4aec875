"""TLS of the picker's listener, for both transports; a reload reads the files again."""

from __future__ import annotations

import ssl
from pathlib import Path

from gorgo.config.model import TlsConfig
from gorgo.live.http.tls import ServedTls, served_tls

#: Place of the files in errors.
PLACE = "picker.tls"
#: HTTP/2 alone: gRPC has no other form.
ALPN = ("h2",)


def picker_tls(files: TlsConfig) -> ServedTls | None:
    """Return TLS of the listener, `None` without a certificate. Raises `ConfigError`."""
    return served_tls(files, place=PLACE, alpn=ALPN)


class PemPair:
    """The bytes of certificate and key, read again once a file has changed; for grpcio, which has a TLS of its own."""

    def __init__(self, files: TlsConfig) -> None:
        assert files.cert is not None, "checked before"
        assert files.key is not None, "checked before"
        self._files = files
        self._paths = (Path(files.key), Path(files.cert))
        self._stamps = self._read_stamps()

    def read(self) -> tuple[bytes, bytes]:
        """Return key and certificate chain."""
        key, cert = self._paths
        return key.read_bytes(), cert.read_bytes()

    def read_changed(self) -> tuple[bytes, bytes] | None:
        """Return the pair if it has changed and is valid; `None` otherwise. A wrong pair is read again at each call."""
        try:
            stamps = self._read_stamps()
            if stamps == self._stamps:
                return None
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(self._paths[1], self._paths[0], password=b"")
            pair = self.read()
        except (OSError, ValueError):  # half-written, or gone: the old pair stays
            return None
        self._stamps = stamps
        return pair

    def _read_stamps(self) -> tuple[tuple[int, int], ...]:
        found = (path.stat() for path in self._paths)
        return tuple((each.st_mtime_ns, each.st_ino) for each in found)
