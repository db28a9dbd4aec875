"""Advice on the keys of a replica: a valid `url` that is rarely meant, a name of several machines, and what to change
after a refusal.

A path is not an error, because a reverse proxy may serve an engine under one. One engine twice is not an error either,
because load is then only counted apart.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from urllib.parse import urlsplit

from gorgo.config.fleet import ReplicaConfig

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
    found: list[str] = []
    first: dict[tuple[str, str, int | None, str], int] = {}
    for number, replica in enumerate(replicas):
        found += _of_path(number, replica.url)
        earlier = first.setdefault(_address(replica.url), number)
        if earlier != number:
            same = f"replicas[{earlier}] ({replicas[earlier].name})"
            found.append(f"replicas[{number}].url: {replica.url} is that of {same}: one engine would count as two")
    return found


def several_addresses(addresses: Iterable[str]) -> str | None:
    """Return the warning for a name with these addresses; `None` for one machine, which may have one of each family.

    >>> several_addresses(["10.0.0.1", "fd00::1"]) is None
    True
    >>> several_addresses(["10.0.0.2", "10.0.0.1"])
    'its name has 2 addresses (10.0.0.1, 10.0.0.2): requests go to one of them; fleet_sources make a replica of each'
    """
    found = sorted(set(addresses))
    families = [[one for one in found if (":" in one) is v6] for v6 in (False, True)]
    most = max(families, key=len)
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
