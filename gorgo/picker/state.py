"""What decides for Envoy in a running picker, above what routes.

Owns `PickerState`, the addresses of replicas as Envoy knows them (`Endpoints`), and the open exchanges with those that
wait for their entry of the access log (`OpenExchanges`). Leaves the Router and what it needs to `gorgo.live.state`.
"""

from __future__ import annotations

import asyncio
import socket
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from ipaddress import ip_address
from itertools import count
from types import MappingProxyType
from typing import Protocol
from urllib.parse import urlsplit

from gorgo.config.model import Config
from gorgo.config.router_settings import router_limits
from gorgo.core.limits import HedgeLimits, RouterLimits
from gorgo.live.event_loop import Clock
from gorgo.live.state import FrontEndKind, LiveState, Replicas, Routing, Telemetry
from gorgo.picker.protocol.messages import HeadReader

# Addresses of replicas, `ip:port`, as Envoy knows them, and back to names. The map is made anew with each change of the
# fleet. A replica whose URL has a name instead of an address is chosen after `resolve` alone.


_PORTS = {"http": 80, "https": 443}
#: By name of a replica: why its name in DNS must not stand for an address, `None` for one that may be.
Checks = Mapping[str, Callable[[str], str | None]]


class Endpoints:
    """Name to address and back.

    Example
    -------
    >>> endpoints = Endpoints({"a": "http://10.0.0.5:30000", "b": "http://[fd00::1]"})
    >>> endpoints.address("a"), endpoints.address("b"), endpoints.replica("10.0.0.5:30000"), endpoints.address("c")
    ('10.0.0.5:30000', '[fd00::1]:80', 'a', None)
    """

    def __init__(self, urls: Mapping[str, str], checks: Checks = MappingProxyType({})) -> None:
        self._addresses: dict[str, str] = {}
        self._resolved: dict[tuple[str, int], str] = {}
        self.configure(urls, checks)

    def configure(self, urls: Mapping[str, str], checks: Checks = MappingProxyType({})) -> None:
        """Use the URLs of another fleet, by name; addresses of names that stay are retained.

        `checks` says why the name of a replica must not stand for an address.
        """
        self._places = {name: _place(url) for name, url in urls.items()}
        self._checks = {self._places[name]: check for name, check in checks.items()}
        self._resolved = {
            host_port: address
            for host_port, address in self._resolved.items()
            if host_port in self._places.values() and self._may_be(host_port, address)
        }
        self._index()

    def address(self, replica: str) -> str | None:
        """Return the address of a replica; `None` until its name is resolved, and for one that has left."""
        return self._addresses.get(replica)

    def replica(self, address: str) -> str | None:
        """Return the replica at an address; `None` for an unknown one."""
        return self._replicas.get(address)

    def replicas(self, addresses: Iterable[str]) -> frozenset[str]:
        """Return the replicas at the addresses that are known."""
        by_address = self._replicas
        return frozenset(by_address[address] for address in addresses if address in by_address)

    async def resolve(self) -> None:
        """Resolve the names in URLs; one that fails keeps its last address."""
        for host_port in {host_port for host_port in self._places.values() if _literal(host_port[0]) is None}:
            try:
                infos = await asyncio.get_running_loop().getaddrinfo(*host_port, type=socket.SOCK_STREAM)
            except OSError:
                continue
            addresses = [text for address in infos if self._may_be(host_port, text := str(address[4][0]))]
            # The one in use stays while the name has it: answers come in another order each time.
            if addresses and self._resolved.get(host_port) not in addresses:
                self._resolved[host_port] = addresses[0]
        self._index()

    def _may_be(self, host_port: tuple[str, int], address: str) -> bool:
        check = self._checks.get(host_port)
        return check is None or check(address) is None

    def _index(self) -> None:
        self._addresses = {}
        for name, host_port in self._places.items():
            host = _literal(host_port[0]) or self._resolved.get(host_port)
            if host is not None:
                self._addresses[name] = f"[{host}]:{host_port[1]}" if ":" in host else f"{host}:{host_port[1]}"
        self._replicas = {address: name for name, address in reversed(self._addresses.items())}


def urls_of(config: Config) -> dict[str, str]:
    """Return the URL of each replica."""
    return {replica.name: replica.url for replica in config.replicas}


def checks_of(config: Config) -> Checks:
    """Return what says why the name of a replica must not stand for an address, where something does."""
    return {replica.name: refuses for replica in config.replicas if (refuses := replica.refuses) is not None}


def _place(url: str) -> tuple[str, int]:
    parts = urlsplit(url)
    return parts.hostname or "", parts.port or _PORTS.get(parts.scheme, 80)


def _literal(host: str) -> str | None:
    try:
        return str(ip_address(host))
    except ValueError:
        return None


# Exchanges that Envoy has open, and those that have ended and wait for their entry of the access log. One of which no
# end is heard is expired, since it would count as load for ever.


#: Longest wait for the entry of an ended exchange, s: Envoy sends entries every 50 ms.
ENTRY_S = 1.0
#: Ended exchanges that wait: a second of four thousand a second. One more closes the oldest.
MAX_WAITING = 4096
#: Between two searches for exchanges that have outlived their time, s.
SWEEP_S = 5.0


class Expiring(Protocol):
    """An exchange."""

    exchange_id: str
    #: Time by which Envoy must have ended it.
    expires_s: float

    def on_timeout(self) -> None:
        """End it: its time has passed."""
        ...

    def close(self) -> None:
        """Close an ended one without its entry."""
        ...


class OpenExchanges:
    """Exchanges by id."""

    def __init__(self, clock: Clock, *, picker: str) -> None:
        self._clock = clock
        self._prefix = f"{picker}-"
        self._numbers = count(1)
        self._by_id: dict[str, Expiring] = {}
        self._waiting: deque[tuple[float, Expiring]] = deque()
        self._timer: asyncio.TimerHandle | None = None
        self._sweeper: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._by_id)

    def next_id(self) -> str:
        """Return an id that no other exchange of any picker has."""
        return f"{self._prefix}{next(self._numbers)}"

    def is_own(self, exchange_id: str) -> bool:
        """Return whether this picker could have given the id."""
        return exchange_id.startswith(self._prefix)

    def add(self, exchange: Expiring) -> None:
        """Add a dispatched exchange."""
        self._by_id[exchange.exchange_id] = exchange
        if self._sweeper is None:
            self._sweeper = asyncio.get_running_loop().call_later(SWEEP_S, self._sweep)

    def get(self, exchange_id: str) -> Expiring | None:
        return self._by_id.get(exchange_id)

    def remove(self, exchange: Expiring) -> None:
        """Remove a closed exchange. Idempotent."""
        self._by_id.pop(exchange.exchange_id, None)

    def await_entry(self, exchange: Expiring) -> None:
        """Close an ended exchange after `ENTRY_S`, unless it is removed before."""
        while self._waiting and self._is_done(self._waiting[0][1]):
            self._waiting.popleft()
        self._waiting.append((self._clock() + ENTRY_S, exchange))
        if len(self._waiting) > MAX_WAITING:
            self._close_first()
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(ENTRY_S, self._close_due)

    def aclose(self) -> None:
        """Close what has ended, and cancel the timers."""
        while self._waiting:
            self._close_first()
        for timer in (self._timer, self._sweeper):
            if timer is not None:
                timer.cancel()
        self._timer = self._sweeper = None

    def _close_first(self) -> None:
        _, exchange = self._waiting.popleft()
        if self._by_id.get(exchange.exchange_id) is exchange:
            exchange.close()

    def _close_due(self) -> None:
        self._timer = None
        now = self._clock()
        while self._waiting and (self._waiting[0][0] <= now or self._is_done(self._waiting[0][1])):
            self._close_first()
        if self._waiting:
            wait_s = max(0.0, self._waiting[0][0] - now)
            self._timer = asyncio.get_running_loop().call_later(wait_s, self._close_due)

    def _is_done(self, exchange: Expiring) -> bool:
        return exchange.exchange_id not in self._by_id

    def _sweep(self) -> None:
        self._sweeper = None
        now = self._clock()
        for exchange in [each for each in self._by_id.values() if each.expires_s <= now]:
            exchange.on_timeout()
        if self._by_id:
            self._sweeper = asyncio.get_running_loop().call_later(SWEEP_S, self._sweep)


#: Addresses behind the first, which Envoy may try by itself.
FALLBACKS = 2
#: Longest time until the choice, s: below a message timeout of 30 s, after which Envoy answers by itself.
HOLD_S = 20.0


@dataclass(slots=True)
class PickerState:
    """The running picker."""

    live: LiveState
    #: Longest time until the choice: to read a large body and in the queue together, s.
    hold_s: float = HOLD_S
    #: Calls that Envoy has open.
    calls: set[object] = field(default_factory=set)
    #: Reads heads of requests.
    heads: HeadReader = field(default_factory=HeadReader)
    endpoints: Endpoints = field(init=False)
    #: Exchanges by this picker's ids.
    open_exchanges: OpenExchanges = field(init=False)
    #: Of `live`.
    routing: Routing = field(init=False)
    replicas: Replicas = field(init=False)
    telemetry: Telemetry = field(init=False)

    def __post_init__(self) -> None:
        live = self.live
        self.routing, self.replicas, self.telemetry = live.routing, live.replicas, live.telemetry
        self.endpoints = Endpoints(urls_of(live.config), checks_of(live.config))
        self.open_exchanges = OpenExchanges(self.routing.clock, picker=self.routing.router.boot_id[:8])
        live.on_config = lambda config: self.endpoints.configure(urls_of(config), checks_of(config))


def _limits(config: Config) -> RouterLimits:
    """Return the Router's bounds: no hedges, which Envoy cannot carry out, and fallbacks."""
    return replace(router_limits(config), hedging=HedgeLimits(budget_ratio=0.0), fallbacks=FALLBACKS)


PICKER = FrontEndKind("picker", _limits, refuses_when_stopping=False)
