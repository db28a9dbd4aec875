"""The routers of a run: how many, which requests go to which, and what they know of each other.

Owns the settings of a group, and the store that carries their reports (`PeerStore`). Leaves what a report says to
`gorgo.core.peers`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from hashlib import blake2b
from typing import Literal

import numpy as np

from gorgo.core.peers.codec import decode_report, encode_report
from gorgo.core.peers.records import PeerReport
from gorgo.errors import ConfigError
from gorgo.lab.sim.event_queue import EventQueue
from gorgo.lab.sim.fleet import SimFleet
from gorgo.lab.sim.network import LATER, Link
from gorgo.lab.sim.routers.shell import RouterShell
from gorgo.lab.sim.topology import Topology
from gorgo.lab.sim.workload import SimRequest

#: Which router gets a request: `random`, as a load balancer without keys; `session`, as one with session affinity;
#: `region`: by session, and each router is in a region of the fleet.
Split = Literal["random", "session", "region"]
#: `none`: each router learns alone; `store`: they report to each other; `local`: so do the workers of one machine, at
#: shorter intervals; `all`: one router sees and decides all.
Sharing = Literal["none", "store", "local", "all"]
SPLITS: tuple[Split, ...] = ("random", "session", "region")
SHARINGS: tuple[Sharing, ...] = ("none", "store", "local", "all")
#: Between two reports of a router, s, and from a report to its receipt: over a store in the same region, and over a
#: socket of one machine.
INTERVALS_S: Mapping[Sharing, float] = {"local": 0.01}
DELAYS_S: Mapping[Sharing, float] = {"local": 0.001}
STORE_INTERVAL_S, STORE_DELAY_S = 0.1, 0.005
#: Within one region.
_LOCAL_RTT_S = 0.002


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterGroup:
    """Routers of one fleet.

    Parameters
    ----------
    count:
        Routers.
    split, sharing:
        As the types say.
    delay_s:
        From a report to its receipt by the others. `None`: as `sharing` has it (`DELAYS_S`).
    loss:
        Share of reports that a receiver never gets.
    topology:
        Where each router is, and its clients, in place of `split`. None: as the fleet has its links.
    """

    count: int = 1
    split: Split = "random"
    sharing: Sharing = "none"
    delay_s: float | None = None
    loss: float = 0.0
    topology: Topology | None = field(default=None, metadata=LATER)

    def __post_init__(self) -> None:
        if self.count < 1:
            raise ConfigError(f"{self.count} routers; expected at least 1")
        if self.split == "region" and self.sharing == "all":
            raise ConfigError("one router that sees all is in one region; expected the split 'random' or 'session'")
        if not (self.report_delay_s >= 0.0 and 0.0 <= self.loss <= 1.0):
            raise ConfigError("reports take a time that is not negative and are lost with a share of 0 to 1")

    def placed(self, topology: Topology | None) -> RouterGroup:
        """Return the group with its routers in their places; raises `ConfigError` where these contradict it."""
        if topology is None:
            return self
        count = len(topology.routers)
        if self.count not in (1, count):
            raise ConfigError(f"{self.count} routers, and a scenario that has {count}; expected no number beside it")
        if self.split != "random" or (self.sharing == "all" and count > 1):
            raise ConfigError(
                f"split {self.split!r}, sharing {self.sharing!r} and routers with places; expected no split, and "
                "sharing none, store or local"
            )
        return replace(self, count=count, topology=topology)

    @property
    def reports(self) -> bool:
        """Return whether the routers report to each other."""
        return self.sharing in ("store", "local")

    @property
    def report_delay_s(self) -> float:
        """Return the time from a report to its receipt, s."""
        return DELAYS_S.get(self.sharing, STORE_DELAY_S) if self.delay_s is None else self.delay_s

    @property
    def interval_s(self) -> float:
        """Return the time between two reports of a router, s."""
        return INTERVALS_S.get(self.sharing, STORE_INTERVAL_S)

    @property
    def shells(self) -> int:
        """Return the routers that decide."""
        return 1 if self.sharing == "all" else self.count

    def router_of(self, request: SimRequest, *, seed: int) -> int:
        """Return the router of a request."""
        if self.shells == 1:
            return 0
        if self.split == "random":
            key = f"{seed} {request.index}"
        else:
            key = f"{request.prefix_hash if request.session_id is None else request.session_id}"
        return int.from_bytes(blake2b(key.encode(), digest_size=8).digest(), "little") % self.count

    def links(self, fleet: SimFleet, number: int) -> Sequence[Link]:
        """Return the links of a router to the replicas.

        The fleet's are those of its proxy. A router elsewhere has its own region near, and others by the way over the
        proxy's region, which is the longest that they can be.
        """
        if self.topology is not None:
            return [each.link for each in self.topology.fleet_of(fleet, number).replicas]
        links = [each.link for each in fleet.replicas]
        if self.split != "region":
            return links
        regions = list(dict.fromkeys(each.region for each in fleet.replicas))
        home = regions[number % len(regions)]
        away_s = min(each.link.rtt_s for each in fleet.replicas if each.region == home)
        if away_s <= _LOCAL_RTT_S:
            return links
        return [
            replace(each.link, rtt_s=_LOCAL_RTT_S if each.region == home else away_s + each.link.rtt_s)
            for each in fleet.replicas
        ]


#: A run of one router.
ONE_ROUTER = RouterGroup()


# The store of a run carries the reports of routers to the others, with delay and loss, and has a history for one that
# joins. Each report takes its wire form on the way, so that a run has what a store would have.


#: Reports in the history: some minutes of a group, as a trimmed stream has.
MAX_HISTORY = 10_000


class PeerStore:
    """Carries reports.

    Parameters
    ----------
    kernel:
        The event queue.
    group:
        Delay, loss and interval.
    seed:
        Of the loss.
    """

    def __init__(self, kernel: EventQueue, group: RouterGroup, *, seed: int) -> None:
        self._kernel = kernel
        self._group = group
        self._chance = np.random.default_rng([seed, 0x73746F7265])
        self._receivers: Sequence[RouterShell] = ()
        self._history: deque[tuple[float, PeerReport]] = deque(maxlen=MAX_HISTORY)
        #: Reports and their bytes.
        self.reports = self.bytes = 0

    def start(self, receivers: Sequence[RouterShell]) -> None:
        """Let routers report in turn, evenly spread over the interval."""
        self._receivers = receivers
        for number, receiver in enumerate(receivers):
            first_s = self._group.interval_s * (number + 1) / len(receivers)
            self._kernel.at(first_s, partial(self._report_in_turn, receiver))

    def publish(self, sender: RouterShell) -> None:
        """Carry a report of `sender`, written now, to the others."""
        text = encode_report(sender.write_report())
        report = decode_report(text)
        self.reports += 1
        self.bytes += len(text)
        self._history.append((self._kernel.now, report))
        arrival_s = self._kernel.now + self._group.report_delay_s
        others = [each for each in self._receivers if each is not sender]
        if others:
            self._kernel.at(arrival_s, partial(self._deliver, others, report))

    def replay(self, receiver: RouterShell) -> None:
        """Give a router that joins the history."""
        for written_s, report in self._history:
            receiver.on_peer(report, age_s=self._kernel.now - written_s)

    def _deliver(self, receivers: Sequence[RouterShell], report: PeerReport) -> None:
        loss = self._group.loss
        for receiver in receivers:
            if not loss or self._chance.random() >= loss:
                receiver.on_peer(report, age_s=self._group.report_delay_s)

    def _report_in_turn(self, sender: RouterShell) -> None:
        if sender.has_news():
            self.publish(sender)
        self._kernel.at(self._kernel.now + self._group.interval_s, partial(self._report_in_turn, sender))
