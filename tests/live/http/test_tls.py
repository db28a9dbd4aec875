"""TLS files that cannot be used: which replica or listener they are of, and what was expected."""

from __future__ import annotations

import re
import ssl
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gorgo.config.fleet import ReplicaConfig
from gorgo.config.model import TlsConfig
from gorgo.errors import ConfigError
from gorgo.live.http.tls import served_tls, shared_tls, upstream_tls

PAIR = "a certificate chain and a private key without a passphrase, both in PEM form"


def replica(**files: Any) -> ReplicaConfig:
    return ReplicaConfig(name="a", region="here", url="https://a:443", **files)


@pytest.mark.parametrize(
    ("files", "subject", "expected"),
    [
        ({"ca_file": "{0}"}, "ca_file '{0}'", "certificates of authorities in PEM form"),
        ({"client_cert": "{0}", "client_key": "{0}"}, "'{0}' with '{0}'", PAIR),
    ],
)
@pytest.mark.parametrize("exists", [True, False])
def test_a_file_of_a_replica_that_cannot_be_used_is_named_with_the_replica(
    files: dict[str, str], subject: str, expected: str, exists: bool, tmp_path: Path
) -> None:
    path = tmp_path / "file.pem"
    if exists:
        path.write_text("no certificate")
    shared = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    with pytest.raises(ConfigError) as raised:
        upstream_tls(replica(**{key: value.format(path) for key, value in files.items()}), shared_tls(shared))
    reason = ".+" if exists else "No such file or directory"
    words = re.escape(f"replica 'a': {subject.format(path)}: ") + reason + re.escape(f"; expected {expected}")
    assert re.fullmatch(words, str(raised.value))


def test_a_replica_without_files_of_its_own_has_the_shared_context() -> None:
    shared = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    assert upstream_tls(replica(), shared_tls(shared)) is shared


def test_the_authorities_are_read_once_and_for_a_replica_that_encrypts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[ssl.SSLContext] = []

    def create() -> ssl.SSLContext:
        made.append(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT))
        return made[-1]

    monkeypatch.setattr(ssl, "create_default_context", create)
    shared = shared_tls()
    plain = upstream_tls(replace(replica(), url="http://a:80"), shared)
    assert made == []
    assert plain.verify_mode is ssl.CERT_REQUIRED, "and it trusts nobody"
    assert plain.get_ca_certs() == []
    assert [upstream_tls(replica(), shared), upstream_tls(replica(), shared)] == [made[0], made[0]]
    assert len(made) == 1


def test_a_certificate_of_the_listener_that_cannot_be_used_is_named() -> None:
    assert served_tls(TlsConfig()) is None
    with pytest.raises(ConfigError, match=f"^proxy.tls: '/no.crt' with '/no.key': No such file.*; expected {PAIR}$"):
        served_tls(TlsConfig(cert="/no.crt", key="/no.key"))
