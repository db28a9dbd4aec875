"""Where the clients and routers of a run are: a matrix of round trips, and each request's way to its router.

Owns the choice of a request's region and router, the links of each router, and what a client waits for beside its
router: the trip there, with the flights of the body, and the trips back. Leaves links and trips to
`gorgo.lab.sim.network`.

Theory of operation. A client has a router near it or far away, and so a connection with windows of its own. A session's
requests share one, which its first request sets up; a request without a session sets up its own. The router receives a
request when its last byte is there, and each client sees a token a trip after its router does. Latencies are then those
of the client. Nothing of this changes a decision: a router does not know where its clients are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import accumulate

import numpy as np

from gorgo.core.numeric import Floats
from gorgo.errors import ScenarioError
from gorgo.lab.sim.fleet import SimFleet
from gorgo.lab.sim.network import Link, RandomTable, SimConnection, TripDelays
from gorgo.lab.sim.workload import SimRequest

#: Within a region.
LOCAL = Link(rtt_s=0.002)


@dataclass(frozen=True, slots=True, kw_only=True)
class Topology:
    """Places of a run.

    Parameters
    ----------
    links:
        Of pairs of regions, either way round.
    local:
        Within a region of which `links` has none.
    routers:
        The region of each.
    clients:
        Share of the clients in each region, of the sum of all. Empty: all are beside the first router, without a way.

    Example
    -------
    >>> far = {("us", "eu"): Link(rtt_s=0.09), ("us", "ap"): Link(rtt_s=0.18), ("eu", "ap"): Link(rtt_s=0.2)}
    >>> topology = Topology(links=far, routers=("us", "eu"), clients={"ap": 1.0})
    >>> topology.link_between("ap", "us").rtt_s, topology.link_between("eu", "eu").rtt_s
    (0.18, 0.002)
    >>> topology.router_of("ap"), topology.router_of("eu")
    (0, 1)
    """

    links: Mapping[tuple[str, str], Link]
    local: Link = LOCAL
    routers: Sequence[str]
    clients: Mapping[str, float] = field(default_factory=dict)

    def link_between(self, one: str, other: str) -> Link:
        """Return the link between two regions; raises `ScenarioError` for a pair that has none."""
        link = self.links.get((one, other)) or self.links.get((other, one))
        if link is not None:
            return link
        if one == other:
            return self.local
        raise ScenarioError(f"network.rtt_ms: no round trip between {one!r} and {other!r}; expected one of every pair")

    def check(self, fleet: SimFleet) -> None:
        """Raise `ScenarioError` for a pair of regions without a round trip."""
        for router in self.routers:
            for region in (*self.clients, *[replica.region for replica in fleet.replicas]):
                self.link_between(router, region)

    def router_of(self, region: str) -> int:
        """Return the number of the router that is nearest to a region, the first of equals."""
        return min(range(len(self.routers)), key=lambda number: self.link_between(region, self.routers[number]).rtt_s)

    def region_of(self, request: SimRequest, *, seed: int) -> str | None:
        """Return the region of a request's client, the same for all of its session; None without clients."""
        if not self.clients:
            return None
        key = f"{seed} {request.prefix_hash if request.session_id is None else request.session_id}"
        drawn = int.from_bytes(blake2b(key.encode(), digest_size=8).digest(), "little") / 2**64
        regions, ends = list(self.clients), list(accumulate(self.clients.values()))
        return next((region for region, end in zip(regions, ends, strict=True) if drawn * ends[-1] < end), regions[-1])

    def fleet_of(self, fleet: SimFleet, number: int) -> SimFleet:
        """Return the fleet as a router has it."""
        here = self.routers[number]
        replicas = [replace(replica, link=self.link_between(here, replica.region)) for replica in fleet.replicas]
        return replace(fleet, replicas=tuple(replicas))

    def mean_rtts_s(self, feed: Sequence[SimRequest], fleet: SimFleet, *, seed: int) -> tuple[Floats, Floats]:
        """Return the mean round trips of each request: of its client to its router, and of that to each replica, s."""
        regions = [self.region_of(request, seed=seed) for request in feed]
        routers = [0 if region is None else self.router_of(region) for region in regions]
        client_rtts_s = [
            0.0 if region is None else self.link_between(region, self.routers[number]).rtt_s
            for region, number in zip(regions, routers, strict=True)
        ]
        links = [[replica.link.rtt_s for replica in self.fleet_of(fleet, n).replicas] for n in range(len(self.routers))]
        return np.array(client_rtts_s), np.array([links[number] for number in routers]).reshape(len(feed), -1).T


class ClientTrip:
    """The way of one request: how long it takes to its router, and each answer's trip back."""

    __slots__ = ("_link", "_trips", "out_s", "received_s", "sent_s")

    def __init__(self, link: Link, trips: TripDelays, *, sent_s: float, out_s: float) -> None:
        self._link = link
        self._trips = trips
        self.sent_s = sent_s
        self.out_s = out_s
        #: When the router has it.
        self.received_s = sent_s + out_s

    def back_s(self) -> float:
        """Return the time of a trip from the router to the client, s."""
        return self._trips.one_way_s(self._link)


@dataclass(frozen=True, slots=True)
class _ClientPath:
    link: Link


class Clients:
    """The clients of one run.

    Parameters
    ----------
    topology:
        Where they are.
    draws, seed:
        The run's.
    """

    def __init__(self, topology: Topology, draws: RandomTable, *, seed: int) -> None:
        self._topology = topology
        self._draws = draws
        self._seed = seed
        #: Of each session; as many as the feed has.
        self._connections: dict[str, SimConnection] = {}

    def start_trip(self, request: SimRequest, *, now: float, key: int) -> tuple[int, ClientTrip]:
        """A client sends a request now; return its router's number and its way. `key` names its random numbers."""
        region = self._topology.region_of(request, seed=self._seed)
        assert region is not None, "clients have places"
        number = self._topology.router_of(region)
        link = self._topology.link_between(region, self._topology.routers[number])
        trips, connection = TripDelays(self._draws, key), self._connection(request, link)
        waits = connection.waits(request.body_bytes, now=now)
        out_s = trips.out_s(link, waits) + link.transfer_s(request.body_bytes)
        return number, ClientTrip(link, trips, sent_s=now, out_s=out_s)

    def _connection(self, request: SimRequest, link: Link) -> SimConnection:
        if request.session_id is None:
            return SimConnection(_ClientPath(link))
        connection = self._connections.get(request.session_id)
        if connection is None:
            connection = self._connections[request.session_id] = SimConnection(_ClientPath(link))
        return connection
