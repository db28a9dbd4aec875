"""Options of a request in its headers, within the rules of its client and model: deadlines, priority, prefix length.

Owns the headers and their 400s.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import isfinite
from typing import NamedTuple

from gorgo.config.model import ClientRuleConfig, Config
from gorgo.core.record import record
from gorgo.live.http.errors import HttpError
from gorgo.live.http.headers import Header, RequestHeaders

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
        names = {model.name for model in config.models} | {name for row in config.replicas for name in row.models}
        return cls(clients, models, frozenset(names))

    def may_see_estimates(self, client: str | None) -> bool:
        """Return whether `client` gets estimates of caches and of its TTFT; always without client keys."""
        return client is None or (client in self.clients and self.clients[client].estimates)

    def request_options(self, headers: Iterable[Header], *, client: str | None, model: str | None) -> RequestOptions:
        """Return the options of the headers within the rules. Raises `HttpError` (400)."""
        if not isinstance(headers, RequestHeaders):
            return self._options(headers, client=client, model=model)
        findings = headers.findings
        known = findings.options
        if known is None or known[0] is not self or known[1] != client or known[2] != model:
            known = findings.options = self, client, model, self._options(headers, client=client, model=model)
        options: RequestOptions = known[3]
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
            own = frozenset(rule.allowed_regions)
            regions = own if regions is None else own & regions
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
    found: dict[bytes, bytes] = {}
    for name, value in headers:
        if name in _EXPECTED:
            found.setdefault(name, value)
    if not found:
        return _NONE_SENT
    priority, prefix_len = found.get(PRIORITY_HEADER), found.get(PREFIX_LEN_HEADER)
    return _Sent(
        _first_s(found, SLO_HEADERS),
        _first_s(found, SLO_TPOT_HEADERS),
        None if priority is None else _priority(priority),
        None if prefix_len is None else _prefix_len(prefix_len),
    )


def _first_s(found: Mapping[bytes, bytes], names: tuple[bytes, ...]) -> float | None:
    for name in names:
        if name in found:
            return _milliseconds(name, found[name]) / 1e3
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
