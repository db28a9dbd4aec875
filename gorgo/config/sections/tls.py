"""Certificates of a listener."""

from __future__ import annotations

from dataclasses import dataclass

from gorgo.config.values import FilePath, strict


@strict
@dataclass(frozen=True, slots=True, kw_only=True)
class TlsConfig:
    """PEM files for TLS of a listener; a reload reads them again."""

    cert: FilePath | None = None
    key: FilePath | None = None


def paired(tls: TlsConfig) -> TlsConfig:
    """Return `tls` if it has both files or none."""
    if (tls.cert is None) != (tls.key is None):
        raise ValueError("cert and key, both or neither")
    return tls
