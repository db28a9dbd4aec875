"""Options of a request in its headers, within the rules of its client and model: deadlines, priority, prefix length.

Owns the headers and their 400s.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from hmac import compare_digest
from math import isfinite
from pathlib import Path
from typing import NamedTuple

from gorgo.config.model import ClientRuleConfig, ClientsConfig, Config
from gorgo.core.record import record
from gorgo.errors import InvalidValueError
from gorgo.live.http.errors import HttpError
from gorgo.live.http.headers import KEYS, Header, RequestHeaders

#: Deadlines of the first token, ms; the first of them that is sent counts.
SLO_HEADERS = (b"x-llm-d-slo-ttft-ms", b"x-slo-ttft-ms")
#: Longest wanted time per output token, ms; likewise.
SLO_TPOT_HEADERS = (b"x-llm-d-slo-tpot-ms", b"x-slo-tpot-ms")
PRIORITY_HEADER = b"x-gorgo-priority"
PRIORITIES: Mapping[bytes, int] = {b"high": 1, b"normal": 0, b"low": -1}
#: First tokens by which `sticky-least-loaded` knows a holder of this prompt.
PREFIX_LEN_HEADER = b"x-gorgo-prefix-len"
MAX_PREFIX_LEN = 1_000_000
#: Each level has a queue of its own.
MAX_PRIORITY = 100
#: An hour: a longer deadline means none.
MAX_SLO_MS = 3_600_000.0
#: Longest number in a header.
_MAX_WORD_BYTES = 32
_EXPECTED = frozenset({*SLO_HEADERS, *SLO_TPOT_HEADERS, PRIORITY_HEADER, PREFIX_LEN_HEADER})


@record
class RequestOptions:
    """Options of one request."""

    slo_ttft_s: float | None = None
    priority: int = 0
    regions: frozenset[str] | None = None
    slo_tpot_s: float | None = None
    prefix_len: int | None = None


@dataclass(frozen=True, slots=True)
class ClientPolicies:
    """Rules of clients and models, by name."""

    clients: Mapping[str, ClientRuleConfig] = field(default_factory=dict)
    models: Mapping[str, frozenset[str]] = field(default_factory=dict)
    #: Names in the configuration.
    known_models: frozenset[str] = frozenset()

    @classmethod
    def for_client(cls, config: Config) -> ClientPolicies:
        clients = {rule.name: rule for rule in config.clients.rules}
        models = {model.name: frozenset(model.allowed_regions) for model in config.models if model.allowed_regions}
        names = {model.name for model in config.models} | {
            name for replica in config.replicas for name in replica.models
        }
        return cls(clients, models, frozenset(names))

    def may_see_estimates(self, client: str | None) -> bool:
        """Return whether `client` gets estimates of caches and its TTFT, and names of replicas; always without keys."""
        return client is None or (client in self.clients and self.clients[client].estimates)

    def request_options(self, headers: Iterable[Header], *, client: str | None, model: str | None) -> RequestOptions:
        """Return the options of the headers within the rules. Raises `HttpError` (400)."""
        if not isinstance(headers, RequestHeaders):
            return self._options(headers, client=client, model=model)
        findings = headers.findings
        cached = findings.options
        if cached is None or cached[0] is not self or cached[1] != client or cached[2] != model:
            cached = findings.options = self, client, model, self._options(headers, client=client, model=model)
        options: RequestOptions = cached[3]
        return options

    def _options(self, headers: Iterable[Header], *, client: str | None, model: str | None) -> RequestOptions:
        sent = _read(headers)
        slo_s, tpot_s, priority, prefix_len = sent
        rule = None if client is None else self.clients.get(client)
        regions = None if model is None else self.models.get(model)
        if rule is None:
            if sent is _NONE_SENT and regions is None:
                return _NOTHING
            # A key without a rule ranks no higher than one whose rule has no priority.
            priority = priority or 0 if client is None else min(priority or 0, 0)
            return RequestOptions(slo_s, priority, regions, tpot_s, prefix_len)
        if rule.allowed_regions:
            allowed = frozenset(rule.allowed_regions)
            regions = allowed if regions is None else allowed & regions
        priority = rule.priority if priority is None else min(priority, rule.priority)
        return RequestOptions(slo_s, priority, regions, tpot_s, prefix_len)

    def may_use(self, *, client: str | None, model: str, regions: frozenset[str]) -> bool:
        """Return whether `client` may have `model` served in any of `regions`."""
        rule = None if client is None else self.clients.get(client)
        allowed = regions & self.models.get(model, regions)
        return bool(allowed & set(rule.allowed_regions) if rule is not None and rule.allowed_regions else allowed)


_NOTHING = RequestOptions()


class _Sent(NamedTuple):
    slo_ttft_s: float | None = None
    slo_tpot_s: float | None = None
    priority: int | None = None
    prefix_len: int | None = None


_NONE_SENT = _Sent()


def _read(headers: Iterable[Header]) -> _Sent:
    """Return what the headers ask for."""
    values: dict[bytes, bytes] = {}
    for name, value in headers:
        if name in _EXPECTED:
            values.setdefault(name, value)
    if not values:
        return _NONE_SENT
    priority, prefix_len = values.get(PRIORITY_HEADER), values.get(PREFIX_LEN_HEADER)
    return _Sent(
        _first_s(values, SLO_HEADERS),
        _first_s(values, SLO_TPOT_HEADERS),
        None if priority is None else _priority(priority),
        None if prefix_len is None else _prefix_len(prefix_len),
    )


def _first_s(values: Mapping[bytes, bytes], names: tuple[bytes, ...]) -> float | None:
    for name in names:
        if name in values:
            return _milliseconds(name, values[name]) / 1e3
    return None


def _milliseconds(name: bytes, value: bytes) -> float:
    try:
        # Python also reads 1_000; other parsers do not.
        number = float(value) if len(value) <= _MAX_WORD_BYTES and b"_" not in value else float("nan")
    except ValueError:
        number = float("nan")
    if not isfinite(number) or not 0 < number <= MAX_SLO_MS:
        expected = f"a number of milliseconds above 0, at most {MAX_SLO_MS:.0f}"
        raise HttpError(400, "invalid_header", f"header {name.decode()}: expected {expected}")
    return number


def _priority(value: bytes) -> int:
    word = value.strip().lower()
    if word in PRIORITIES:
        return PRIORITIES[word]
    digits = word[1:] if word[:1] == b"-" else word
    if digits.isdigit() and len(digits) <= 3 and int(digits) <= MAX_PRIORITY:
        return int(word)
    expected = f"high, normal, low or a whole number from -{MAX_PRIORITY} to {MAX_PRIORITY}"
    raise HttpError(400, "invalid_header", f"header {PRIORITY_HEADER.decode()}: expected {expected}")


def _prefix_len(value: bytes) -> int:
    word = value.strip()
    if word.isdigit() and len(word) <= _MAX_WORD_BYTES and 0 < int(word) <= MAX_PREFIX_LEN:
        return int(word)
    expected = f"a whole number of tokens from 1 to {MAX_PREFIX_LEN}"
    raise HttpError(400, "invalid_header", f"header {PREFIX_LEN_HEADER.decode()}: expected {expected}")


# Authentication of clients by keys, of which only the SHA-256 is stored.
#
# Theory of operation. A key is a long random word, so its hash cannot be reversed. The hash of a client's key is
# compared with all hashes, each in constant time, to the end of the list: the duration of a check reveals nothing.
# Headers that repeat those of an earlier request, key included, are admitted as these were. Off by default: without a
# list no key is required, and a client's key passes to the replica.


#: Comparing all of them takes 0.25 ms; more need an identity provider in front.
MAX_KEYS = 1024
#: Size of a list of so many keys with names and comments.
_MAX_FILE_BYTES = 1 << 20
_ENTRY = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]{0,62}):([0-9a-fA-F]{64})")
#: Hashes of nothing, and of the line end that `echo` adds to it.
_EMPTY = frozenset(sha256(key).digest() for key in (b"", b"\n", b"\r\n", b" "))
_CHALLENGE = ((b"www-authenticate", b"Bearer"),)
_PLACE = "clients.keys_file"
_EXPECTED_KEY = "NAME:SHA256, the key's hash as 64 hexadecimal digits"


class ClientKeys:
    """Names of clients by hash of key. Several keys may have one name: an old one and its successor."""

    __slots__ = ("_names",)

    def __init__(self, entries: Iterable[tuple[str, bytes]]) -> None:
        self._names = tuple(entries)

    def __len__(self) -> int:
        return len(self._names)

    @property
    def names(self) -> frozenset[str]:
        """Names of the clients."""
        return frozenset(name for name, _ in self._names)

    def name_of(self, key: bytes) -> str | None:
        """Return the name of a key, None for an unknown one. Takes equally long for each."""
        digest = sha256(key).digest()
        matched = None
        for name, entry_digest in self._names:
            if compare_digest(digest, entry_digest):
                matched = name
        return matched

    def admit(self, headers: Sequence[Header]) -> tuple[str, list[Header]]:
        """Return the client's name, and the headers without the key. Raises `HttpError` (401)."""
        findings = headers.findings if isinstance(headers, RequestHeaders) else None
        if findings is not None and findings.admitted is not None and findings.admitted[0] is self:
            _, client, index, others = findings.admitted
            left = RequestHeaders(headers, others)
            del left[index]
            return client, left
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
    entries = _entries(_read_credential(path).splitlines(), path)
    if not 0 < len(entries) <= MAX_KEYS:
        raise InvalidValueError(_PLACE, f"{path!r}: {len(entries)} keys", f"1 to {MAX_KEYS}, each as {_EXPECTED_KEY}")
    return ClientKeys(entries)


def _entries(lines: Iterable[str], path: str) -> list[tuple[str, bytes]]:
    """Parse entries. Errors name a line by its number: it may be a key that was not hashed."""
    entries = []
    for number, line in enumerate(lines, 1):
        text = line.split("#", 1)[0].strip()
        if not text:
            continue
        match = _ENTRY.fullmatch(text)
        if match is None:
            raise InvalidValueError(_PLACE, f"{path!r}: line {number} is no entry", _EXPECTED_KEY)
        digest = bytes.fromhex(match[2])
        if digest in _EMPTY:
            problem = f"{path!r}: line {number} has the hash of an empty key; was the variable with the key not set?"
            raise InvalidValueError(_PLACE, problem, _EXPECTED_KEY)
        entries.append((match[1], digest))
    return entries


def _read_credential(path: str) -> str:
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
