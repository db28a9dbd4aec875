"""Who may send requests: keys of clients, known by their SHA-256 alone.

Owns reading the list, the check, and taking a key that was for the proxy out of what goes on to a replica. Leaves what
a name may do to whoever gets the name.

Theory of operation. A key is a long random word, so its bare hash cannot be turned back, and the file with the hashes
is no secret worth stealing. The hash of what a client sends is compared with all that are known, each in constant
time, and the loop runs to its end: how long a check takes says nothing about any key. Off by default: without a list
nobody is asked, and what a client sends as its key is for the replica.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from hashlib import sha256
from hmac import compare_digest
from pathlib import Path

from gorgo.config.model import ClientsConfig
from gorgo.errors import ConfigError
from gorgo.proxy.http.errors import HttpError
from gorgo.proxy.http.headers import KEYS, Header

#: Comparing with all of them takes a quarter of a millisecond; more need an identity provider in front.
MAX_KEYS = 1024
#: Of a list of so many keys with names and remarks.
_MAX_FILE_BYTES = 1 << 20
_ENTRY = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]{0,62}):([0-9a-fA-F]{64})")
_CHALLENGE = ((b"www-authenticate", b"Bearer"),)
_EXPECTED = "NAME:SHA256, the key's hash as 64 hexadecimal digits"


class ClientKeys:
    """Those who are known, by hash. Several keys may have one name: an old one and its successor."""

    __slots__ = ("_names",)

    def __init__(self, known: Iterable[tuple[str, bytes]]) -> None:
        self._names = tuple(known)

    def __len__(self) -> int:
        return len(self._names)

    def name_of(self, key: bytes) -> str | None:
        """The name that goes with `key`. Takes as long for each key, known or not."""
        digest = sha256(key).digest()
        found = None
        for name, known in self._names:
            if compare_digest(digest, known):
                found = name
        return found

    def admit(self, headers: Iterable[Header]) -> tuple[str, list[Header]]:
        """Who asks, and the headers without the key. Raises `HttpError` (401), which never says what was wrong."""
        kept: list[Header] = []
        given: list[Header] = []
        for pair in headers:
            (given if pair[0] in KEYS else kept).append(pair)
        name = self.name_of(_key(given[0])) if len(given) == 1 else None
        if name is None:
            message = "expected Authorization: Bearer with the key of a known client"
            raise HttpError(401, "invalid_api_key", message, headers=_CHALLENGE)
        return name, kept


def read_client_keys(clients: ClientsConfig) -> ClientKeys | None:
    """Read the file of `clients.keys_file`; return `None` without one. Raises `ConfigError`.

    A list without an entry is an error: it would lock everybody out.
    """
    if clients.keys_file is None:
        return None
    known = _entries(_read(clients.keys_file).splitlines(), f"clients.keys_file {clients.keys_file!r}: line")
    if not 0 < len(known) <= MAX_KEYS:
        raise ConfigError(f"clients: {len(known)} keys; expected 1 to {MAX_KEYS}, each as {_EXPECTED}")
    return ClientKeys(known)


def _entries(lines: Iterable[str], place: str) -> list[tuple[str, bytes]]:
    """What is wrong is told by its number alone: it may be a key that somebody forgot to hash."""
    known = []
    for number, line in enumerate(lines, 1):
        text = line.split("#", 1)[0].strip()
        if not text:
            continue
        match = _ENTRY.fullmatch(text)
        if match is None:
            raise ConfigError(f"{place} {number} is no entry; expected {_EXPECTED}")
        known.append((match[1], bytes.fromhex(match[2])))
    return known


def _read(path: str) -> str:
    try:
        if Path(path).is_fifo():
            raise ValueError("a pipe, which is waited for")  # by every stream of the proxy, at a reload
        with Path(path).open("rb") as file:
            content = file.read(_MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as failure:
        reason = getattr(failure, "strerror", None) or str(failure)
        raise ConfigError(f"clients.keys_file {path!r}: {reason}; expected a file of client keys") from failure
    if len(content) > _MAX_FILE_BYTES:
        raise ConfigError(f"clients.keys_file {path!r}: larger than {_MAX_FILE_BYTES} bytes")
    return content.decode("utf-8", "replace")


def _key(header: Header) -> bytes:
    name, value = header
    if name != b"authorization":
        return value
    scheme, _, key = value.partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else b""
