"""The parts of a Router without the Router: what its other sides are made of, for tests of one side alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gorgo.core.admission import AdmissionController
from gorgo.core.dispatch.dispatcher import Dispatcher
from gorgo.core.dispatch.in_flight import Attempt, InFlightTable, RequestState
from gorgo.core.dispatch.prefix_updates import CacheAccuracy, PrefixUpdater
from gorgo.core.fleet.fleet import Fleet
from gorgo.core.fleet.region_outage import RegionOutages
from gorgo.core.fleet.request_filter import RequestFilter
from gorgo.core.limits import RouterLimits
from gorgo.core.messages.actions import Action, Dispatch
from gorgo.core.messages.request import RouteRequest
from gorgo.core.peers.group import PeerGroup
from gorgo.core.peers.records import PeerStatus
from gorgo.core.policy.weights import Weights
from gorgo.core.prefix.index import Answers, PrefixIndex
from gorgo.core.prefix.kv_feeds import KvFeeds
from gorgo.core.prefix.residency import FoundShares
from gorgo.core.training.learning import Learning
from gorgo.policies.registry import make_policy
from tests.core.routers import specs

STATUS = PeerStatus("nearest", 1, False, None, (), ())


@dataclass
class Parts:
    """Parts of one Router, and the calls that they make to it."""

    fleet: Fleet
    table: InFlightTable
    request_filter: RequestFilter
    regions: RegionOutages
    index: PrefixIndex
    feeds: KvFeeds
    found_shares: FoundShares
    accuracy: CacheAccuracy
    prefix_updater: PrefixUpdater
    learning: Learning
    dispatcher: Dispatcher
    admission: AdmissionController
    peers: PeerGroup
    #: Times at which the queue was drained, and those of events that changed nothing.
    drained_s: list[float]
    recorded_s: list[float]

    def drain_queue(self, now: float) -> list[Action]:
        self.drained_s.append(now)
        return []

    def dispatch(self, request: RouteRequest, *, now: float) -> Dispatch:
        """Send a request to the best replica."""
        evaluation = self.dispatcher.evaluate(request, self.request_filter.eligible(request, now), now=now)
        return self.dispatcher.dispatch(RequestState(request, False), evaluation, now=now)

    def open_attempt(self, attempt_id: str) -> Attempt:
        attempt = self.table.find(attempt_id)
        assert attempt is not None
        return attempt


def make_parts(*names: str, policy: str = "nearest", slow_start_s: float = 0.0) -> Parts:
    """Parts whose replicas are the nearer the earlier they are named."""
    limits, chosen = RouterLimits(), make_policy(policy)
    fleet = Fleet(
        stale_after_s=limits.stale_after_s,
        rtt_ewma_alpha=limits.rtt_ewma_alpha,
        panic_threshold=limits.panic_threshold,
        ejection=limits.outlier,
    )
    table, request_filter = InFlightTable(fleet), RequestFilter(fleet, slow_start_s=slow_start_s)
    index, feeds = PrefixIndex(max_blocks=1000, bounded=True), KvFeeds(max_blocks=1000)
    found_shares, answers, accuracy, learning = FoundShares(), Answers(), CacheAccuracy(), Learning(chosen, None)
    updater = PrefixUpdater(index, fleet, found_shares, answers, feeds, accuracy, block_tokens=limits.block_tokens)
    dispatcher = Dispatcher(
        fleet,
        table,
        index,
        found_shares,
        answers,
        feeds,
        updater,
        policy=chosen,
        weights=Weights.of(chosen.weight_specs, version=1),
        rng=np.random.default_rng(0),
        shadow=None,
        learning=learning,
        limits=limits,
    )
    drained_s: list[float] = []
    recorded_s: list[float] = []

    def drain_queue(now: float) -> list[Action]:
        drained_s.append(now)
        return []

    peers = PeerGroup(
        fleet,
        table,
        found_shares,
        index,
        feeds,
        updater,
        dispatcher,
        status=lambda: STATUS,
        record_time=recorded_s.append,
        drain_queue=drain_queue,
    )
    parts = Parts(
        fleet,
        table,
        request_filter,
        RegionOutages(fleet, window_s=limits.region_window_s),
        index,
        feeds,
        found_shares,
        accuracy,
        updater,
        learning,
        dispatcher,
        AdmissionController(fleet, dispatcher, request_filter, limits.overload),
        peers,
        drained_s,
        recorded_s,
    )
    updater.on_fleet_change(fleet.replace(specs(*names)))
    for rank, name in enumerate(names):
        fleet.probed(fleet.member(name), 0.01 * (rank + 1), now=0.0)
    return parts
