"""Advice on valid keys that are rarely meant so: a `url`, a name of several machines, unused reports, slow scrapes.

Owns what to change after a refusal as well. A path is not an error, because a reverse proxy may serve an engine under
one. One engine twice is not an error either, because load is then only counted apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from urllib.parse import urlsplit

from gorgo.config.fleet import ReplicaConfig, SourceReplicaConfig
from gorgo.config.model import Config
from gorgo.config.router_settings import model_names
from gorgo.core.policy.interface import Policy, scrape_interval_s, slow_signals

#: Models named in a sentence.
_NAMED = 4

_REFUSED, _NOT_FOUND = frozenset({401, 403}), frozenset({404, 405})
_PORTS = {"http": 80, "https": 443}
#: The first part of every route of OpenAI's API, which is in the `base_url` of its clients.
_API = "/v1"
#: Addresses of a name in one warning.
ADDRESSES_SHOWN = 4


def url_warnings(replicas: Sequence[ReplicaConfig]) -> list[str]:
    """Return a sentence for each `url` with a path, and for each one that an earlier replica has.

    >>> url_warnings([ReplicaConfig(name="a", region="eu", url="http://10.0.0.5:30000/v1")])
    ['replicas[0].url: http://10.0.0.5:30000/v1 ends in /v1, which the proxy adds itself; write http://10.0.0.5:30000']
    """
    warnings: list[str] = []
    first: dict[tuple[str, str, int | None, str], int] = {}
    for number, replica in enumerate(replicas):
        warnings += _of_path(number, replica.url)
        earlier = first.setdefault(_address(replica.url), number)
        if earlier != number:
            same = f"replicas[{earlier}] ({replicas[earlier].name})"
            warnings.append(f"replicas[{number}].url: {replica.url} is that of {same}: one engine would count as two")
    return warnings


def report_warnings(config: Config, policies: Sequence[Policy]) -> list[str]:
    """Return a sentence for each replica or source whose reports of caches no decision can use.

    `policies` are the policy and the shadow policy, if there is one.
    """
    places: list[tuple[str, ReplicaConfig | SourceReplicaConfig]] = [
        *((f"replicas[{number}]", replica) for number, replica in enumerate(config.replicas)),
        *((f"fleet_sources[{number}].replica", each.replica) for number, each in enumerate(config.fleet_sources)),
    ]
    reads, tokenizers = any(policy.index == "events" for policy in policies), _tokenizers(config)
    warnings: list[str] = []
    for entry_key, replica in places:
        keys = [key for key in ("kv_events", "push_token_env") if getattr(replica, key) is not None]
        missing = [name for name in _served(config, replica) if name not in tokenizers]
        if not keys:
            continue
        if not reads:
            warnings.append(f"{entry_key}.{keys[0]}: history: policy {policies[0].name} reads no reports of caches")
        elif missing or not tokenizers:
            warnings.append(
                f"{entry_key}.{keys[0]}: history: no tokenizer for {', '.join(missing) or 'any model'}; "
                "set models[].tokenizer"
            )
    return warnings


def model_warnings(config: Config, policies: Sequence[Policy], listed: Mapping[str, Sequence[str]]) -> list[str]:
    """Return a sentence for each replica whose reports count for nothing, by the models that it lists itself."""
    if not any(policy.index == "events" for policy in policies):
        return []
    tokenizers, aliases = _tokenizers(config), model_names(config)
    warnings = []
    for replica in config.replicas:
        names = [aliases.get(name, name) for name in listed.get(replica.name, ())]
        reports = replica.kv_events is not None or replica.push_token_env is not None
        if reports and not replica.models and names and not any(name in tokenizers for name in names):
            warnings.append(
                f"{replica.name}: history: no tokenizer for {', '.join(names[:_NAMED])}; set models[].tokenizer"
            )
    return warnings


def scrape_warnings(configured_s: float | None, policies: Sequence[Policy]) -> list[str]:
    """Return a sentence if scrapes are too slow for a policy.

    >>> from gorgo.policies.registry import make_policy
    >>> scrape_warnings(30.0, [make_policy("predicted-latency")])[0]
    'proxy.scrape_interval_s: 30 s is too slow: predicted-latency needs queued_requests, used_tokens at most 1 s old'
    """
    warnings = []
    for policy in policies:
        slow = slow_signals(scrape_interval_s(configured_s, *policies), policy)
        if slow:
            needs = f"{policy.name} needs {', '.join(slow)} at most {min(slow.values()):g} s old"
            warnings.append(f"proxy.scrape_interval_s: {configured_s:g} s is too slow: {needs}")
    return warnings


def _tokenizers(config: Config) -> set[str]:
    return {model.name for model in config.models if model.tokenizer is not None}


def _served(config: Config, replica: ReplicaConfig | SourceReplicaConfig) -> list[str]:
    aliases = model_names(config)
    return [aliases.get(name, name) for name in replica.models]


def several_addresses(addresses: Iterable[str]) -> str | None:
    """Return the warning for a name with these addresses; `None` for one machine, which may have one of each family.

    >>> several_addresses(["10.0.0.1", "fd00::1"]) is None
    True
    >>> several_addresses(["10.0.0.2", "10.0.0.1"])
    'its name has 2 addresses (10.0.0.1, 10.0.0.2): requests go to one of them; fleet_sources make a replica of each'
    """
    distinct = set(addresses)
    six = {address for address in distinct if ":" in address}
    most = sorted(six if len(six) > len(distinct - six) else distinct - six)
    if len(most) < 2:
        return None
    more = f" and {len(most) - ADDRESSES_SHOWN} more" if len(most) > ADDRESSES_SHOWN else ""
    shown = ", ".join(most[:ADDRESSES_SHOWN]) + more
    where = "requests go to one of them; fleet_sources make a replica of each"
    return f"its name has {len(most)} addresses ({shown}): {where}"


def remedy(status: int, *, url: str, api_key_env: str | None) -> str | None:
    """Return what to change in `regions.yaml` after a replica's status; None if the status does not tell.

    >>> remedy(401, url="http://a:30000", api_key_env=None)
    'set api_key_env to the environment variable that holds its API key'
    """
    if status in _REFUSED:
        if api_key_env is None:
            return "set api_key_env to the environment variable that holds its API key"
        return f"it refuses the API key in {api_key_env}"
    if status not in _NOT_FOUND:
        return None
    if _has_api_path(url):
        return f"write its url without {_API}: {without_api_path(url)}"
    return "check its url and engine: it has no such route"


def without_api_path(url: str) -> str:
    """Return `url` without a final `/v1`.

    >>> without_api_path("http://a:30000/v1/")
    'http://a:30000'
    """
    return url.rstrip("/").removesuffix(_API) if _has_api_path(url) else url.rstrip("/")


def _of_path(number: int, url: str) -> Iterator[str]:
    path = urlsplit(url).path.rstrip("/")
    if _has_api_path(url):
        wanted = without_api_path(url)
        yield f"replicas[{number}].url: {url} ends in {_API}, which the proxy adds itself; write {wanted}"
    elif path:
        sent = f"requests go to {url.rstrip('/')}/v1/..."
        yield f"replicas[{number}].url: {url} has the path {path}: {sent}; remove it unless a reverse proxy needs it"


def _has_api_path(url: str) -> bool:
    return urlsplit(url).path.rstrip("/").endswith(_API)


def _address(url: str) -> tuple[str, str, int | None, str]:
    """Return a form that is equal for URLs of the same engine."""
    parts = urlsplit(without_api_path(url))
    return parts.scheme, (parts.hostname or "").rstrip("."), parts.port or _PORTS.get(parts.scheme), parts.path
