"""Authentication of clients by keys, of which only the SHA-256 is stored.

Owns the list, the check, and removing the key from the headers for a replica. Leaves a client's rules to
`request_options`.

Theory of operation. A key is a long random word, so its hash cannot be reversed. The hash of a client's key is compared
with all hashes, each in constant time, to the end of the list: the duration of a check reveals nothing. Headers that
repeat those of an earlier request, key included, are admitted as these were. Off by default: without a list no key is
required, and a client's key passes to the replica.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from hashlib import sha256
from hmac import compare_digest
from pathlib import Path

from gorgo.config.model import ClientsConfig
from gorgo.errors import InvalidValueError
from gorgo.live.http.errors import HttpError
from gorgo.live.http.headers import KEYS, Header, RequestHeaders

#: Comparing all of them takes 0.25 ms; more need an identity provider in front.
MAX_KEYS = 1024
#: Size of a list of so many keys with names and comments.
_MAX_FILE_BYTES = 1 << 20
_ENTRY = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]{0,62}):([0-9a-fA-F]{64})")
#: Hashes of nothing, and of the line end that `echo` adds to it.
_EMPTY = frozenset(sha256(key).digest() for key in (b"", b"\n", b"\r\n", b" "))
_CHALLENGE = ((b"www-authenticate", b"Bearer"),)
_PLACE = "clients.keys_file"
_EXPECTED = "NAME:SHA256, the key's hash as 64 hexadecimal digits"


class ClientKeys:
    """Names of clients by hash of key. Several keys may have one name: an old one and its successor."""

    __slots__ = ("_names",)

    def __init__(self, known: Iterable[tuple[str, bytes]]) -> None:
        self._names = tuple(known)

    def __len__(self) -> int:
        return len(self._names)

    @property
    def names(self) -> frozenset[str]:
        """Names of the clients."""
        return frozenset(name for name, _ in self._names)

    def name_of(self, key: bytes) -> str | None:
        """Return the name of a key, None for an unknown one. Takes equally long for each."""
        digest = sha256(key).digest()
        found = None
        for name, known in self._names:
            if compare_digest(digest, known):
                found = name
        return found

    def admit(self, headers: Sequence[Header]) -> tuple[str, list[Header]]:
        """Return the client's name, and the headers without the key. Raises `HttpError` (401)."""
        findings = headers.findings if isinstance(headers, RequestHeaders) else None
        if findings is not None and findings.admitted is not None and findings.admitted[0] is self:
            _, known, place, others = findings.admitted
            left = RequestHeaders(headers, others)
            del left[place]
            return known, left
        rest: list[Header] = []
        keys: list[Header] = []
        for pair in headers:
            (keys if pair[0] in KEYS else rest).append(pair)
        key = _key(keys[0]) if len(keys) == 1 else b""
        name = self.name_of(key) if key else None
        if name is None:
            message = "expected Authorization: Bearer with the key of a known client"
            raise HttpError(401, "invalid_api_key", message, headers=_CHALLENGE)
        if findings is not None:
            rest = RequestHeaders(rest)
            findings.admitted = self, name, headers.index(keys[0]), rest.findings
        return name, rest


def read_client_keys(clients: ClientsConfig) -> ClientKeys | None:
    """Read the file of `clients.keys_file`; return `None` without one. Raises `ConfigError`.

    A list without an entry is an error: it would reject every client.
    """
    if clients.keys_file is None:
        return None
    path = clients.keys_file
    known = _entries(_read(path).splitlines(), path)
    if not 0 < len(known) <= MAX_KEYS:
        raise InvalidValueError(_PLACE, f"{path!r}: {len(known)} keys", f"1 to {MAX_KEYS}, each as {_EXPECTED}")
    return ClientKeys(known)


def _entries(lines: Iterable[str], path: str) -> list[tuple[str, bytes]]:
    """Parse entries. Errors name a line by its number: it may be a key that was not hashed."""
    known = []
    for number, line in enumerate(lines, 1):
        text = line.split("#", 1)[0].strip()
        if not text:
            continue
        match = _ENTRY.fullmatch(text)
        if match is None:
            raise InvalidValueError(_PLACE, f"{path!r}: line {number} is no entry", _EXPECTED)
        digest = bytes.fromhex(match[2])
        if digest in _EMPTY:
            found = f"{path!r}: line {number} has the hash of an empty key; was the variable with the key not set?"
            raise InvalidValueError(_PLACE, found, _EXPECTED)
        known.append((match[1], digest))
    return known


def _read(path: str) -> str:
    try:
        if Path(path).is_fifo():
            raise ValueError("is a pipe")  # reading it would block the event loop
        with Path(path).open("rb") as file:
            content = file.read(_MAX_FILE_BYTES + 1)
    except (OSError, ValueError) as failure:
        reason = getattr(failure, "strerror", None) or str(failure)
        raise InvalidValueError(_PLACE, f"{path!r}: {reason}", "a file of client keys") from failure
    if len(content) > _MAX_FILE_BYTES:
        raise InvalidValueError(_PLACE, f"{path!r}: larger than {_MAX_FILE_BYTES} bytes", "a file of client keys")
    return content.decode("utf-8", "replace")


def _key(header: Header) -> bytes:
    name, value = header
    if name != b"authorization":
        return value
    scheme, _, key = value.partition(b" ")
    return key.strip() if scheme.lower() == b"bearer" else b""
