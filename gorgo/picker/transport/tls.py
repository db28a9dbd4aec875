"""TLS of the picker's listener, and whether its files have changed."""

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


class PemFiles:
    """Certificate and key on disk, and whether they have changed since they were last in use."""

    def __init__(self, files: TlsConfig) -> None:
        assert files.cert is not None, "checked before"
        assert files.key is not None, "checked before"
        self._paths = (Path(files.key), Path(files.cert))
        self._stamps = self._read_stamps()

    def have_changed(self) -> bool:
        """Return whether the files are another valid pair than before. A wrong pair is looked at again at each call."""
        try:
            stamps = self._read_stamps()
            if stamps == self._stamps:
                return False
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(self._paths[1], self._paths[0], password=b"")
        except (OSError, ValueError):  # half-written, or gone: the old pair stays
            return False
        self._stamps = stamps
        return True

    def _read_stamps(self) -> tuple[tuple[int, int], ...]:
        found = (path.stat() for path in self._paths)
        return tuple((each.st_mtime_ns, each.st_ino) for each in found)
