"""SRV records of DNS, sans-IO: the question, the records of an answer, names by resolv.conf (RFC 1035 and 2782)."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from ipaddress import ip_address

from gorgo.errors import GorgoError
from gorgo.fleet_sources.dns import HostPort

#: Of a message over UDP that no path fragments; larger answers are truncated and sent over TCP.
MAX_UDP_BYTES = 1232
#: As resolv.conf(5): more servers are not read.
_MAX_SERVERS = 3
_MAX_DOMAINS = 6
_MAX_NDOTS = 15
#: Labels of a name, and pointers that its compression follows.
_MAX_LABELS = 128
#: Lengths of a label and of a whole name.
_LABEL, _NAME = 63, 253

_SRV, _OPT, _INTERNET = 33, 41, 1
_RESPONSE, _TRUNCATED, _RECURSION = 0x8000, 0x0200, 0x0100
_HEADER = struct.Struct("!6H")
_RECORD = struct.Struct("!HHIH")
_SERVICE = struct.Struct("!HHH")
_HOST = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]*[A-Za-z0-9_])?")
_CODES = {1: "FORMERR", 2: "SERVFAIL", 3: "NXDOMAIN", 4: "NOTIMP", 5: "REFUSED"}


class SrvError(GorgoError):
    """A name that cannot be sent, or an answer that cannot be read. The text is the reason."""


@dataclass(frozen=True, slots=True)
class ResolverFile:
    """Servers and search domains of resolv.conf."""

    servers: tuple[str, ...] = ("127.0.0.1",)
    domains: tuple[str, ...] = ()
    ndots: int = 1


@dataclass(frozen=True, slots=True)
class SrvAnswer:
    """Records of an answer; `missing` if the name has none, `truncated` if they did not fit."""

    targets: tuple[HostPort, ...] = ()
    ttl_s: float | None = None
    truncated: bool = False
    missing: bool = False


def read_resolver_file(text: str) -> ResolverFile:
    """Return what resolv.conf says; a line that cannot be read is skipped, as resolvers do.

    >>> read_resolver_file("nameserver 10.96.0.10\\nsearch llm.svc.cluster.local\\noptions ndots:5\\n").ndots
    5
    """
    servers: list[str] = []
    domains: tuple[str, ...] = ()
    ndots = 1
    for line in text.splitlines():
        key, *values = line.partition("#")[0].split() or [""]
        if key == "nameserver" and values and _is_address(values[0]):
            servers.append(values[0])
        elif key in ("search", "domain") and values:
            domains = tuple(values[:_MAX_DOMAINS])
        elif key == "options":
            for option in values:
                name, _, number = option.partition(":")
                if name == "ndots" and number.isdecimal():
                    ndots = min(int(number), _MAX_NDOTS)
    return ResolverFile(tuple(servers[:_MAX_SERVERS]) or ("127.0.0.1",), domains, ndots)


def names_to_try(name: str, file: ResolverFile) -> list[str]:
    """Return the full names for `name`, in the order in which a resolver tries them.

    >>> names_to_try("_http._tcp.engines", ResolverFile(domains=("llm.svc.cluster.local",), ndots=5))
    ['_http._tcp.engines.llm.svc.cluster.local', '_http._tcp.engines']
    """
    if name.endswith("."):
        return [name.rstrip(".")]
    searched = [f"{name}.{domain.strip('.')}" for domain in file.domains if domain.strip(".")]
    return [name, *searched] if name.count(".") >= file.ndots else [*searched, name]


def srv_question(name: str, number: int) -> bytes:
    """Return the message that asks for the SRV records of `name`. Raises `SrvError` for what is no name."""
    labels = name.split(".")
    if len(name) > _NAME or not all(_HOST.fullmatch(label) and len(label) <= _LABEL for label in labels):
        raise SrvError(f"{name!r} is no name")
    encoded = b"".join(bytes((len(label),)) + label.encode() for label in labels) + b"\0"
    header = _HEADER.pack(number, _RECURSION, 1, 0, 0, 1)
    option = b"\0" + _RECORD.pack(_OPT, MAX_UDP_BYTES, 0, 0)
    return header + encoded + struct.pack("!HH", _SRV, _INTERNET) + option


def read_srv_answer(message: bytes, name: str, number: int) -> SrvAnswer | None:
    """Return the records of `message`, or `None` if it does not answer the question. Raises `SrvError`."""
    try:
        return _read(message, name, number)
    except (struct.error, IndexError, UnicodeDecodeError) as error:
        raise SrvError("an answer that cannot be read") from error


def _read(message: bytes, name: str, number: int) -> SrvAnswer | None:
    got, flags, questions, answers, _, _ = _HEADER.unpack_from(message)
    if got != number or not flags & _RESPONSE or questions != 1:
        return None
    question, at = _name(message, _HEADER.size)
    if question.lower() != name.lower() or struct.unpack_from("!HH", message, at) != (_SRV, _INTERNET):
        return None
    code = flags & 0xF
    if code == 3:
        return SrvAnswer(missing=True)
    if code:
        raise SrvError(f"the name server answers {_CODES.get(code, f'code {code}')}")
    if flags & _TRUNCATED:
        return SrvAnswer(truncated=True)
    targets, ttl_s = _records(message, at + 4, answers)
    return SrvAnswer(tuple(targets), ttl_s, missing=not targets)


def _records(message: bytes, at: int, count: int) -> tuple[Iterable[HostPort], float | None]:
    """Return targets and the shortest time to live. Other records, as those of an alias, are skipped."""
    targets: list[HostPort] = []
    ttl_s: float | None = None
    for _ in range(count):
        _, at = _name(message, at)
        kind, network, seconds, length = _RECORD.unpack_from(message, at)
        at += _RECORD.size
        if (kind, network) == (_SRV, _INTERNET):
            _, _, port = _SERVICE.unpack_from(message, at)
            target, _ = _name(message, at + _SERVICE.size)
            if target:  # the root says that there is no such service
                targets.append(_target(target, port))
                ttl_s = float(seconds) if ttl_s is None else min(ttl_s, float(seconds))
        at += length
    return targets, ttl_s


def _target(name: str, port: int) -> HostPort:
    if not port or not all(_HOST.fullmatch(label) for label in name.split(".")):
        raise SrvError(f"a record with the target {name[:_NAME]!r} and port {port}")
    return HostPort(name, port)


def _name(message: bytes, at: int) -> tuple[str, int]:
    """Return the name at `at`, and where the next field begins. Raises `SrvError` for a name without an end."""
    labels: list[str] = []
    end: int | None = None
    for _ in range(_MAX_LABELS):
        length = message[at]
        if length >= 0xC0:
            end = at + 2 if end is None else end
            at = struct.unpack_from("!H", message, at)[0] & 0x3FFF
        elif length:
            label = message[at + 1 : at + 1 + length]
            if length > _LABEL or len(label) < length:
                raise SrvError("an answer that cannot be read")
            labels.append(label.decode("ascii"))
            at += 1 + length
        else:
            return ".".join(labels), at + 1 if end is None else end
    raise SrvError("an answer that cannot be read")


def _is_address(text: str) -> bool:
    try:
        ip_address(text.partition("%")[0])
    except ValueError:
        return False
    return True
