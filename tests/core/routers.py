"""Routers, their parts and requests as tests write them, and the moves of a request's life in short."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from gorgo.core.admission import AdmissionController
from gorgo.core.dispatch.dispatcher import Dispatcher
from gorgo.core.dispatch.in_flight import Attempt, InFlightTable, RequestState
from gorgo.core.dispatch.prefix_updates import CacheAccuracy, PrefixUpdater
from gorgo.core.fleet.fleet import Fleet, RegionOutages
from gorgo.core.fleet.replica import ReplicaSpec
from gorgo.core.fleet.request_filter import RequestFilter
from gorgo.core.limits import RouterLimits
from gorgo.core.messages.actions import Action, Dispatch, Reject
from gorgo.core.messages.request import AttemptResult, Outcome, RouteRequest
from gorgo.core.peers.group import PeerGroup
from gorgo.core.peers.records import PeerStatus
from gorgo.core.policy.weights import Weights
from gorgo.core.prefix.index import Answers, PrefixIndex
from gorgo.core.prefix.kv_feeds import KvFeeds
from gorgo.core.prefix.residency import FoundShares
from gorgo.core.router import Router
from gorgo.core.training.learning import Learning
from gorgo.policies.registry import make_policy

# --- Routers and requests as tests write them, and the moves of a request's life in short.


def specs(*names: str) -> list[ReplicaSpec]:
    return [ReplicaSpec(name, region=f"region-of-{name}") for name in names]


def timed(name: str, region: str | None = None, *, max_running_requests: int | None = None) -> ReplicaSpec:
    """A replica that prefills 1,000 tokens a second, and nothing else."""
    return ReplicaSpec(
        name,
        region or f"region-of-{name}",
        max_running_requests=max_running_requests,
        prefill_base_s=0.0,
        prefill_tokens_per_s=1000.0,
        prefill_kappa_s=0.0,
    )


def make_router(
    *names: str,
    policy: str = "nearest",
    replicas: Sequence[ReplicaSpec] | None = None,
    limits: RouterLimits | None = None,
) -> Router:
    """A router whose replicas are the nearer the earlier they are named: `nearest` takes the first that may serve."""
    router = Router(
        replicas or specs(*names),
        make_policy(policy),
        rng=np.random.default_rng(0),
        boot_id="boot",
        limits=limits or RouterLimits(),
    )
    for rank, spec in enumerate(replicas or specs(*names)):
        router.replicas.on_probe(spec.name, 0.01 * (rank + 1), now=0.0)
    return router


def blocks_of(*words: int) -> bytes:
    """A fingerprint: block k of two prompts is equal when all words up to k are."""
    return b"".join(hash(words[: end + 1]).to_bytes(8, "little", signed=True) for end in range(len(words)))


def a_request(
    request_id: str = "r",
    *,
    prompt_tokens: int = 256,
    blocks: bytes = b"",
    received_s: float = 0.0,
    model: str | None = None,
    pinned_replica: str | None = None,
    streamed: bool = True,
    body_bytes: int = 0,
    client: str | None = None,
) -> RouteRequest:
    return RouteRequest(
        request_id,
        received_s,
        prompt_tokens,
        blocks,
        64.0,
        1,
        model=model,
        pinned_replica=pinned_replica,
        streamed=streamed,
        body_bytes=body_bytes,
        client=client,
    )


def submitted(router: Router, request: RouteRequest, *, now: float) -> list[Action]:
    """All actions of `submit`, the request's own last."""
    own, others = router.submit(request, now=now)
    return [*others, own]


def finished(router: Router, attempt_id: str, outcome: Outcome, *, now: float) -> list[Action]:
    """All actions of `on_finish`, the request's own first."""
    own, others = router.on_finish(attempt_id, outcome, now=now)
    return others if own is None else [own, *others]


def dispatched(actions: Sequence[Action]) -> Dispatch:
    (action,) = actions
    assert isinstance(action, Dispatch), action
    return action


def rejected(actions: Sequence[Action]) -> Reject:
    (action,) = actions
    assert isinstance(action, Reject), action
    return action


COMPLETED = Outcome(AttemptResult.COMPLETED, status=200)
FAILED = Outcome(AttemptResult.FAILED_BEFORE_CONTENT, status=500)
BUSY = Outcome(AttemptResult.BUSY, status=503)
GONE = Outcome(AttemptResult.CLIENT_DISCONNECTED)
BROKEN = Outcome(AttemptResult.FAILED_AFTER_CONTENT, status=200)
REFUSED = Outcome(AttemptResult.UPSTREAM_4XX, status=400)

PROMPT = blocks_of(1, 2, 3, 4)


def load_of(router: Router, name: str) -> tuple[int, int, int]:
    (row,) = [row for row in router.view.snapshots(now=0.0) if row.name == name]
    return row.in_flight_requests, row.in_flight_tokens, row.queued_prefill_tokens


def believed(router: Router, blocks: bytes = PROMPT) -> list[float]:
    return list(router.index.match(blocks, 3))


def fail_on(router: Router, outcome: Outcome, times: int, *, now: float = 1.0) -> None:
    for index in range(times):
        attempt = dispatched(submitted(router, a_request(f"f{index}", pinned_replica="a"), now=now)).attempt_id
        router.on_finish(attempt, outcome, now=now)


def set_weights(router: Router, values: Mapping[str, float], *, now: float = 0.0) -> Weights:
    """Replace the values named, as the next version."""
    weights = router.settings.weights.changed(router.settings.policy.weight_specs, values)
    router.settings.set_weights(weights, now=now)
    return weights


def set_policy(router: Router, name: str, values: Mapping[str, float] | None = None, *, now: float = 0.0) -> Weights:
    """Route by another policy, by its defaults and `values`, as the next version."""
    policy = make_policy(name)
    weights = Weights.of(policy.weight_specs, values, version=router.settings.weights.version + 1)
    router.settings.set_policy(policy, weights, now=now)
    return weights


# --- The parts of a Router without the Router: what its other sides are made of, for tests of one side alone.


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
