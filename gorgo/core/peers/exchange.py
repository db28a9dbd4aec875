"""The exchange of one Router with its peers: what it reports, and what of their reports it takes in.

Owns the steps between records and the Router's parts: loads to `fleet.peer_loads`, learned speeds and shares to those
that learn them here. Leaves prefixes to `shared_prefixes`. A shell carries the reports.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import inf

import numpy as np

from gorgo.core.dispatch.in_flight import InFlightTable
from gorgo.core.fleet.fleet import Fleet, FleetChange
from gorgo.core.fleet.outlier import HealthState
from gorgo.core.fleet.peer_loads import FADE_S, MAX_PEERS, PeerLoads
from gorgo.core.fleet.replica import Replica
from gorgo.core.latency.prefill_share import faded
from gorgo.core.lru import Lru
from gorgo.core.messages.actions import Dispatch
from gorgo.core.peers.marks import GroupPrefixes
from gorgo.core.peers.outbox import URGENT_PREFILL_S, Outbox
from gorgo.core.peers.own_loads import own_loads
from gorgo.core.peers.records import MAX_PREFILL_S, PeerReport, PeerStatus, StartedPrefill
from gorgo.core.peers.routes import PolicyRoutes
from gorgo.core.peers.shared_prefixes import SharedPrefixes
from gorgo.core.peers.speeds import PeerSpeeds
from gorgo.core.policy.interface import Policy
from gorgo.core.prefix.answers import Answers, GivenAnswer
from gorgo.core.prefix.found_share import FoundShares
from gorgo.core.prefix.index import PrefixIndex
from gorgo.core.prefix.origin import Origin

#: Longest time between two reports, s: three of them fit into `FADE_S`.
HEARTBEAT_S = 0.5
#: Replicas to probe that a shell has not taken yet.
_MAX_HINTS = 1000


def is_urgent(dispatch: Dispatch) -> bool:
    """Return whether to report now: until the next report in turn, others would choose without this prefill."""
    estimate = dispatch.decision.estimate
    return estimate is not None and estimate.prefill_s >= URGENT_PREFILL_S


@dataclass(frozen=True, slots=True)
class PeerView:
    """One peer as an operator reads it."""

    router: str
    status: PeerStatus
    received_s: float
    #: Whether its load counts; not when it is silent.
    counts: bool
    same_key: bool


class PeerExchange:
    """Reports out and in.

    Parameters
    ----------
    name:
        The Router's own, unique in its group and run.
    key_id:
        Names the fingerprint key. Prefixes of peers with another one are ignored.
    fleet, table, found_shares, answers:
        The Router's.
    index, capacity_of:
        The Router's, and the blocks that fit into a replica's cache, `None` if unknown.
    policy, status:
        The policy and the status of now.
    """

    def __init__(
        self,
        name: str,
        *,
        key_id: str,
        fleet: Fleet,
        table: InFlightTable,
        found_shares: FoundShares,
        answers: Answers,
        index: PrefixIndex,
        capacity_of: Callable[[Replica], int | None],
        policy: Callable[[], Policy],
        status: Callable[[], PeerStatus],
    ) -> None:
        self.name, self.key_id = name, key_id
        self._fleet, self._table, self._found_shares, self._answers = fleet, table, found_shares, answers
        self.status = status
        self.loads = PeerLoads(name, fleet.columns)
        self.prefixes = GroupPrefixes()
        self.outbox = Outbox()
        #: Of what results of attempts say of prefixes.
        self.observer = SharedPrefixes(
            self.prefixes,
            self.outbox,
            PolicyRoutes(policy),
            fleet=fleet,
            found_shares=found_shares,
            index=index,
            capacity_of=capacity_of,
        )
        #: Replicas that a peer has ejected and this Router has not: a shell probes them now.
        self.probe_hints: deque[str] = deque(maxlen=_MAX_HINTS)
        self._seq = 0
        self._reported_s, self._reported_changes = -inf, 0
        self._last = Lru[str, tuple[int, PeerStatus, float, bool]](MAX_PEERS)
        self._speeds = PeerSpeeds()
        table.started_prefills = {}

    # -- out

    def has_news(self, *, now: float) -> bool:
        """Return whether to report in turn: something has changed, or others would take silence for death."""
        changed = self._table.changes != self._reported_changes or self.outbox
        return bool(changed) or now - self._reported_s >= HEARTBEAT_S

    def report(self, *, now: float) -> PeerReport:
        """Return the present load, and what happened since the last report."""
        self._seq += 1
        self._reported_s, self._reported_changes = now, self._table.changes
        prefixes, cache_reports, answers = self.outbox.take_entries()
        return PeerReport(
            self.name,
            self._seq,
            self.key_id,
            tuple(own_loads(self._table, now=now)),
            prefixes,
            cache_reports,
            answers,
            tuple(self._take_prefills()),
            tuple(self._speeds.own(self._fleet.replicas, seq=self._seq)),
            self.status(),
        )

    def _take_prefills(self) -> Iterator[StartedPrefill]:
        started, self._table.started_prefills = self._table.started_prefills, {}
        for name, prefill_s in (started or {}).items():
            if name in self._fleet.replicas:
                yield StartedPrefill(name, min(prefill_s, MAX_PREFILL_S))

    # -- in

    def on_report(self, report: PeerReport, *, now: float, age_s: float = 0.0) -> bool:
        """Take in a report that was written `age_s` ago by the store's clock; return whether it was news.

        One from before `FADE_S`, as of a router that has ended, is a source of prefixes and learned values alone.
        """
        last = self._last.get(report.router)
        if report.router == self.name or (last is not None and report.seq <= last[0]):
            return False
        same_key = report.key_id == self.key_id
        for router in self._last.put(report.router, (report.seq, report.status, now - age_s, same_key)):
            self._speeds.forget(router)
        if age_s < FADE_S:
            self._take_loads(report, now=now)
            self._take_hints(report.status, None if last is None else last[1])
        if same_key:
            for marks in report.prefixes:
                self.observer.take_prefixes(marks, now=now)
            for answer in report.answers:
                replica = self._fleet.replicas.get(answer.replica)
                if replica is not None:
                    given = GivenAnswer(answer.prompt_tokens, answer.output_tokens)
                    self._answers.add_by_hash(replica.slot, answer.prompt, given)
        for prefill in report.prefills:
            replica = self._fleet.replicas.get(prefill.replica)
            if replica is not None:
                self._fleet.add_prefill(replica, faded(prefill.prefill_s, age_s), now=now)
        for sample in report.cache_reports:
            replica = self._fleet.replicas.get(sample.replica)
            if replica is not None:
                self._found_shares.learn(
                    replica.slot,
                    sample.model,
                    confirmed_tokens=sample.confirmed_tokens,
                    found_tokens=sample.found_tokens,
                )
        self._speeds.take_samples(report.router, report.speeds, self._fleet.replicas)
        return True

    def views(self, *, now: float) -> list[PeerView]:
        """Return the peers heard of, the last one last."""
        self.loads.expire(now=now)
        counting = self.loads.routers
        return [
            PeerView(router, status, received_s, router in counting, same_key)
            for router, (_, status, received_s, same_key) in self._last.items()
        ]

    def evicted(self) -> Counter[Origin]:
        """Return the marks, and the routes of the policy, that were evicted so far, by origin."""
        return self.observer.evicted()

    def on_fleet_change(self, change: FleetChange) -> None:
        """Forget replicas that have left."""
        left = list(change.left_slots)
        if left:
            self.loads.clear_slots(left)
            for slot in left:
                self.prefixes.flush(slot)

    def check(self) -> None:
        """Assert every invariant; visits all marks."""
        self.loads.check()
        self.prefixes.check()

    def _take_loads(self, report: PeerReport, *, now: float) -> None:
        # The last load of a replica counts.
        rows = {
            replica.slot: row
            for row, load in enumerate(report.loads)
            if (replica := self._fleet.replicas.get(load.replica)) is not None
        }
        slots = np.fromiter(rows, np.intp, len(rows))
        cells = report.load_cells
        if len(rows) < len(cells):
            cells = cells[list(rows.values())]
        self.loads.replace(report.router, slots, cells, now=now)

    def _take_hints(self, status: PeerStatus, before: PeerStatus | None) -> None:
        known = () if before is None else before.ejected
        for name in status.ejected:
            replica = self._fleet.replicas.get(name)
            if name not in known and replica is not None and replica.health.state is HealthState.HEALTHY:
                self.probe_hints.append(name)
