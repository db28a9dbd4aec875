"""Addresses of replicas, `ip:port`, as Envoy knows them, and back to names.

Owns the map, made anew with each change of the fleet. A replica whose URL has a name instead of an address is chosen
after `resolve` alone.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterable, Mapping
from ipaddress import ip_address
from urllib.parse import urlsplit

from gorgo.config.model import Config

_PORTS = {"http": 80, "https": 443}


class Endpoints:
    """Name to address and back.

    Example
    -------
    >>> endpoints = Endpoints({"a": "http://10.0.0.5:30000", "b": "http://[fd00::1]"})
    >>> endpoints.address("a"), endpoints.address("b"), endpoints.replica("10.0.0.5:30000"), endpoints.address("c")
    ('10.0.0.5:30000', '[fd00::1]:80', 'a', None)
    """

    def __init__(self, urls: Mapping[str, str]) -> None:
        self._addresses: dict[str, str] = {}
        self._resolved: dict[tuple[str, int], str] = {}
        self.configure(urls)

    def configure(self, urls: Mapping[str, str]) -> None:
        """Use the URLs of another fleet, by name; addresses of names that stay are retained."""
        self._places = {name: _place(url) for name, url in urls.items()}
        self._resolved = {place: found for place, found in self._resolved.items() if place in self._places.values()}
        self._index()

    def address(self, replica: str) -> str | None:
        """Return the address of a replica; `None` until its name is resolved, and for one that has left."""
        return self._addresses.get(replica)

    def replica(self, address: str) -> str | None:
        """Return the replica at an address; `None` for an unknown one."""
        return self._replicas.get(address)

    def replicas(self, addresses: Iterable[str]) -> frozenset[str]:
        """Return the replicas at the addresses that are known."""
        known = self._replicas
        return frozenset(known[address] for address in addresses if address in known)

    async def resolve(self) -> None:
        """Resolve the names in URLs; one that fails keeps its last address."""
        for place in {place for place in self._places.values() if _literal(place[0]) is None}:
            try:
                found = await asyncio.get_running_loop().getaddrinfo(*place, type=socket.SOCK_STREAM)
            except OSError:
                continue
            if found:
                self._resolved[place] = str(found[0][4][0])
        self._index()

    def _index(self) -> None:
        self._addresses = {}
        for name, place in self._places.items():
            host = _literal(place[0]) or self._resolved.get(place)
            if host is not None:
                self._addresses[name] = f"[{host}]:{place[1]}" if ":" in host else f"{host}:{place[1]}"
        self._replicas = {address: name for name, address in reversed(self._addresses.items())}


def urls_of(config: Config) -> dict[str, str]:
    """Return the URL of each replica."""
    return {replica.name: replica.url for replica in config.replicas}


def _place(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    return parts.hostname or "", parts.port or _PORTS.get(parts.scheme, 80)


def _literal(host: str) -> str | None:
    try:
        return str(ip_address(host))
    except ValueError:
        return None
