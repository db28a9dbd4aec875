"""From what a source found to entries of replicas, by the rules of `replicas` in regions.yaml.

Owns the result of a source (`Found`) with the entries that follow from it, the reading of labels and annotations
(`make_entry`), and the replicas of a name in DNS (`found_addresses`). Leaves objects of Kubernetes to `kubernetes`. A
label cannot have the slash of many names of models, so annotations of the same keys are read too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from functools import lru_cache, partial
from hashlib import blake2b
from ipaddress import IPv4Address, IPv6Address, IPv6Network, ip_address, ip_network
from types import MappingProxyType
from typing import Any
from urllib.parse import urlsplit

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from gorgo.config.document import Document
from gorgo.config.fleet import CapacityConfig, FleetSourceConfig, ReplicaConfig, SourceReplicaConfig
from gorgo.config.load import explain
from gorgo.config.model import Config
from gorgo.config.registered import entry_adapter
from gorgo.errors import closest

#: Prefix of the labels and annotations that describe a replica.
PREFIX = "gorgo-router/"
#: Kubernetes sets it on nodes, and from version 1.35 on their pods.
REGION_LABEL = "topology.kubernetes.io/region"
#: Labels and annotations by key, ascending.
Described = tuple[tuple[str, str], ...]

# What a source found: replicas with their state, and objects that make none, each with the reason.


#: Replicas that one source may have. Above it the source is misconfigured; 10,000 take the Router milliseconds.
MAX_REPLICAS = 10_000


class ReplicaState(Enum):
    """Whether an object may get requests."""

    READY = "ready"
    #: Starts, or fails its readiness probe.
    NOT_READY = "not_ready"
    #: Announces its end: a pod that is deleted, an endpoint that terminates.
    STOPPING = "stopping"


@dataclass(frozen=True, slots=True)
class FoundReplica:
    """A replica of a source."""

    entry: ReplicaConfig
    state: ReplicaState = ReplicaState.READY


@dataclass(frozen=True, slots=True)
class Found:
    """The whole result of a source at one time.

    Parameters
    ----------
    replicas:
        Each name once.
    rejected:
        Reason by the name that the replica would have: a label that cannot be read, no region.
    """

    replicas: tuple[FoundReplica, ...] = ()
    rejected: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedReplica(ReplicaConfig):
    """A replica of a source that has a name in the place of an address.

    What the name stands for is checked at each look-up: whoever writes its zone may change it at any time.
    """

    #: As in `FleetSourceConfig`.
    local_addresses: bool = False

    @property
    def refuses(self) -> Callable[[str], str | None]:
        """Return what says why no replica of the source is at an address; `None` if one may be."""
        return partial(refused_address, local=self.local_addresses, is_name_allowed=False)


def _checked_later(replica: FoundReplica, config: FleetSourceConfig) -> FoundReplica:
    values = {key.name: getattr(replica.entry, key.name) for key in fields(ReplicaConfig)}
    return replace(replica, entry=NamedReplica(**values, local_addresses=config.local_addresses))


def without_refused(result: Found, config: FleetSourceConfig) -> Found:
    """Return the result without replicas at addresses that no replica of a source has, which are `rejected`.

    Prompts and keys of engines would go to the own machine, or to the metadata service of its cloud.
    """
    retained: list[FoundReplica] = []
    rejected = dict(result.rejected)
    for replica in result.replicas:
        host = urlsplit(replica.entry.url).hostname or ""
        reason = refused_address(host, local=config.local_addresses, is_name_allowed=not config.watches)
        if reason is None:
            retained.append(_checked_later(replica, config) if _is_name(host) else replica)
        else:
            rejected[replica.entry.name] = reason
    return Found(tuple(retained), rejected)


def _is_name(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return True
    return False


def refused_address(host: str, *, local: bool, is_name_allowed: bool) -> str | None:
    """Return why no replica of a source is at `host`; `None` if one may be.

    >>> refused_address("169.254.169.254", local=False, is_name_allowed=False)
    'its address 169.254.169.254 is link-local; expected one of a network, or `local_addresses: true`'
    """
    try:
        address = _inner(ip_address(host))
    except ValueError:
        if not is_name_allowed:
            return f"its address {host!r} is none; expected an IP address"
        last = host.rstrip(".").rpartition(".")[2].lower()
        if _NUMBER.fullmatch(last):
            return f"its address {host!r} is neither a name nor written as usual"
        return f"its name {host} is that of the own machine" if last == "localhost" and not local else None
    if address.is_unspecified or address.is_multicast or any(address in network for network in _NO_MACHINE):
        return f"its address {host} is that of no machine"
    kind = "loopback" if address.is_loopback else "link-local" if address.is_link_local else None
    if address in _OF_CLOUDS:
        kind = "that of a cloud's own service"
    if kind is None or local:
        return None
    return f"its address {host} is {kind}; expected one of a network, or `local_addresses: true`"


#: "This network", and those of class E with the broadcast.
_NO_MACHINE = tuple(map(ip_network, ("0.0.0.0/8", "240.0.0.0/4")))
#: Addresses of networks at which clouds answer their machines with secrets: AWS by IPv6, Alibaba, Azure.
_OF_CLOUDS = frozenset(map(ip_address, ("fd00:ec2::254", "100.100.100.200", "168.63.129.16")))
#: Prefixes of IPv6 with an address of IPv4 in the last 32 bits: of translators (RFC 6052), and the old compatible one.
_WITH_IPV4 = tuple(map(IPv6Network, ("64:ff9b::/96", "::/96")))
#: The end of what resolvers read as an address: `127.1`, `0x7f000001`.
_NUMBER = re.compile(r"[0-9]+|0x[0-9a-f]*")


def _inner(address: IPv4Address | IPv6Address) -> IPv4Address | IPv6Address:
    """Return the address of IPv4 that one of IPv6 stands for, else itself."""
    if isinstance(address, IPv4Address):
        return address
    if int(address) > 1 and any(address in network for network in _WITH_IPV4):
        return IPv4Address(int(address) & 0xFFFFFFFF)
    return address.ipv4_mapped or address.sixtofour or address


def next_entries(before: Mapping[str, ReplicaConfig], result: Found) -> dict[str, ReplicaConfig]:
    """Return the entries of a source after `result`, by name.

    A replica that is not ready, or stopping, drains if it was in use, and is left out otherwise. A replica whose object
    became invalid stays as it was: an edit with an error must not take it away.
    """
    after: dict[str, ReplicaConfig] = {}
    for replica in result.replicas:
        entry = replica.entry
        was = before.get(entry.name)
        if replica.state is ReplicaState.READY:
            after[entry.name] = entry
        elif was is not None and was.url == entry.url:
            after[entry.name] = replace(entry, draining=True)
    for name in result.rejected:
        if name in before and name not in after:
            after[name] = before[name]
    return after


@dataclass(frozen=True, slots=True)
class Merged:
    """A configuration with the replicas of its sources.

    Parameters
    ----------
    joined:
        The entries that have joined, by source and name.
    refused:
        Why others have not, or not as their source has them now, by source and name.
    """

    config: Config
    joined: Mapping[tuple[str, str], ReplicaConfig]
    refused: Mapping[tuple[str, str], str]


def merge(
    file: Config,
    sources: Mapping[str, Iterable[ReplicaConfig]],
    before: Mapping[tuple[str, str], ReplicaConfig] = MappingProxyType({}),
) -> Merged:
    """Return the configuration with the entries of all sources.

    The file goes first, then the sources in their order: a name or a URL counts once. An entry that came into a region
    which is not one stays as it was in `before`, the entries that joined last: a mistyped annotation must not take a
    replica that serves out of the fleet.
    """
    names = {replica.name for replica in file.replicas}
    urls = {replica.url.rstrip("/"): replica.name for replica in file.replicas}
    regions = {region.name for region in file.regions}
    joined: dict[tuple[str, str], ReplicaConfig] = {}
    refused: dict[tuple[str, str], str] = {}
    for source, entries in sources.items():
        for entry in entries:
            key, url = (source, entry.name), entry.url.rstrip("/")
            if entry.name in names:
                refused[key] = "another replica has its name"
                continue
            if url in urls:
                refused[key] = f"{url} is the url of {urls[url]}"
                continue
            if entry.region not in regions:
                refused[key] = f"its region {entry.region!r} is not one of `regions`"
                was = before.get(key)
                if was is None or was.url != entry.url or was.region not in regions:
                    continue
                refused[key] += f": it stays as it was, in {was.region!r}"
                entry = replace(was, draining=entry.draining)
            names.add(entry.name)
            urls[url] = entry.name
            joined[key] = entry
    return Merged(replace(file, replicas=(*file.replicas, *joined.values())), joined, refused)


#: As `config.values.Name`.
_MAX_NAME = 63
_NOT_A_NAME = re.compile(r"[^A-Za-z0-9._-]+")

_CAPACITY = tuple(field.name for field in fields(CapacityConfig))
_SHARED = tuple(
    field.name for field in fields(SourceReplicaConfig) if field.name not in ("region", "scheme", "capacity")
)


def _whole(value: str) -> object:
    return int(value) if re.fullmatch(r"[0-9]{1,15}", value) else value


def _real(value: str) -> object:
    return float(value) if re.fullmatch(r"[0-9]{1,15}(\.[0-9]{1,9})?", value) else value


def _flag(value: str) -> object:
    return {"true": True, "false": False}.get(value, value)


def _names(value: str) -> object:
    return [name.strip() for name in value.split(",") if name.strip()]


def _same(value: str) -> object:
    return value


#: Key after the prefix: place in an entry of `replicas`, and how its text is read.
KEYS: Mapping[str, tuple[tuple[str, ...], Callable[[str], object]]] = {
    "models": (("models",), _names),
    "engine": (("engine",), _same),
    "accelerator": (("accelerator",), _same),
    "region": (("region",), _same),
    "request-usage": (("request_usage",), _flag),
    "draining": (("draining",), _flag),
    "kv-tokens": (("capacity", "kv_tokens"), _whole),
    "max-running-requests": (("capacity", "max_running_requests"), _whole),
    "prefill-tokens-per-s": (("capacity", "prefill_tokens_per_s"), _real),
}
_KEY_OF = {place: PREFIX + key for key, (place, _) in KEYS.items()}


def replica_name(text: str) -> str:
    """Return `text` as the name of a replica; a long one is shortened, and stays unique by a digest.

    >>> replica_name("qwen-5d8f-x2kq")
    'qwen-5d8f-x2kq'
    """
    name = _NOT_A_NAME.sub("-", text).lstrip("._-") or "replica"
    if len(name) <= _MAX_NAME:
        return name
    digest = blake2b(text.encode(), digest_size=5).hexdigest()
    return f"{name[: _MAX_NAME - len(digest) - 1]}-{digest}"


def url_of(scheme: str, host: str, port: int) -> str:
    """Return the URL of an address.

    >>> url_of("http", "fd00::5", 30000)
    'http://[fd00::5]:30000'
    """
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


@lru_cache(maxsize=2 * MAX_REPLICAS)
def make_entry(
    name: str,
    host: str,
    port: int,
    described: Described,
    shared: SourceReplicaConfig,
    node_region: str | None = None,
) -> ReplicaConfig | str:
    """Return the entry of a replica, or what is wrong with the labels and annotations of its object.

    Cached: a change of one object makes the entries of all anew.

    Parameters
    ----------
    described:
        Labels and annotations of the object, as `kubernetes.described` returns them.
    shared:
        Keys of the source; labels and annotations take precedence.
    node_region:
        Of its node; the object's own region takes precedence, the one of the source comes last.
    """
    values = dict(described)
    region = values.pop(REGION_LABEL, None) or node_region or shared.region
    data: dict[str, Any] = {key: getattr(shared, key) for key in _SHARED}
    data |= {"name": name, "region": region, "url": url_of(shared.scheme, host, port)}
    capacity = {key: getattr(shared.capacity, key) for key in _CAPACITY}
    for label, value in values.items():
        key = label.removeprefix(PREFIX)
        if key not in KEYS:
            return f"{label}: unknown key{closest(key, KEYS)}; expected one of {', '.join(KEYS)}"
        key_path, read = KEYS[key]
        (capacity if key_path[0] == "capacity" else data)[key_path[-1]] = read(value)
    if data["region"] is None:
        return f"no region; expected the label {REGION_LABEL}, {PREFIX}region, or replica.region of the source"
    try:
        return entry_adapter().validate_json(json.dumps({**data, "capacity": capacity}), strict=True)
    except ValidationError as invalid:
        return "; ".join(_explained(error, data) for error in invalid.errors(include_url=False))


def _explained(error: ErrorDetails, data: Mapping[str, object]) -> str:
    problem = explain(error, Document(data=data), ReplicaConfig)
    key_path = tuple(part for part in problem.path if isinstance(part, str))
    return f"{_KEY_OF.get(key_path, '.'.join(key_path))}: {problem.found}; expected {problem.expected}"


# Answers of DNS to replicas: one per address.


@dataclass(frozen=True, slots=True, order=True)
class HostPort:
    """Host or address, and port."""

    host: str
    port: int


@dataclass(frozen=True, slots=True)
class Resolved:
    """Addresses, and how long they are valid, s; `None` is unknown."""

    addresses: Sequence[HostPort]
    ttl_s: float | None = None


def found_addresses(addresses: Iterable[HostPort], source: FleetSourceConfig) -> Found:
    """Return the replicas of addresses; names have the source's and the address, as `engines-10.0.0.5-30000`."""
    replicas: list[FoundReplica] = []
    rejected: dict[str, str] = {}
    for address in sorted(set(addresses)):
        name = replica_name(f"{source.name}-{address.host}-{address.port}")
        entry = make_entry(name, address.host, address.port, (), source.replica)
        if isinstance(entry, str):
            rejected[name] = f"{source.host}: {entry}"
        else:
            replicas.append(FoundReplica(entry))
    return Found(tuple(replicas), rejected)
