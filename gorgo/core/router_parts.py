"""The parts of a Router that its callers reach by name: `replicas`, `caches`, `settings` and `view`.

Each is one thing that a shell asks of the Router: what a replica reports, what is known of the caches, what may be
replaced while it runs, and what a reader sees. A setting takes effect with the next event and moves no request that is
in flight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from math import inf
from types import MappingProxyType

import numpy as np

from gorgo.core.admission import AdmissionController
from gorgo.core.dispatch.dispatcher import Dispatcher
from gorgo.core.dispatch.in_flight import Attempt, InFlightTable, PoisonPrompt, PoisonPrompts
from gorgo.core.dispatch.prefix_updates import CacheAccuracy, PrefixUpdater
from gorgo.core.fleet.fleet import Fleet, RegionOutages
from gorgo.core.fleet.replica import Columns, HealthState, Replica, ReplicaSpec, one_way_s, record_connection
from gorgo.core.fleet.request_filter import RequestFilter, SlowStart
from gorgo.core.fleet.snapshot import ReplicaSnapshot, snapshot_replica
from gorgo.core.latency.decode import relative_to_others
from gorgo.core.latency.prefill import faded
from gorgo.core.limits import RouterLimits
from gorgo.core.messages.actions import Action, ReplicaRestarted
from gorgo.core.messages.decision import CacheSourceStats, Decision
from gorgo.core.messages.kv_events import CacheChanges, CacheEvictions, CacheSnapshot, KvEventBatch, PushedFeed
from gorgo.core.messages.request import EngineSample, OpenConnection, SampleRing
from gorgo.core.peers.group import PeerGroup
from gorgo.core.policy.interface import (
    HasRoutes,
    IndexKind,
    Policy,
    RouteStats,
    hashed_block_sizes,
    required_index,
    validate_shadow,
)
from gorgo.core.policy.weights import Weights
from gorgo.core.prefix.index import PrefixIndex
from gorgo.core.prefix.kv_feeds import KvFeeds
from gorgo.core.prefix.residency import FoundShares
from gorgo.core.scaling import Group, GroupEvidence, ServedRequest
from gorgo.core.training.learning import Learning, OutcomeRecorder, find_learner


class RouterSettings:
    """What decides, and within which bounds. The values in force are where they are used: this hands them out.

    Parameters
    ----------
    dispatcher, learning, table, index, feeds, admission:
        The Router's.
    limits:
        In force at the start.
    apply_limits:
        Hands other limits to every part that has one.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        learning: Learning,
        table: InFlightTable,
        index: PrefixIndex,
        feeds: KvFeeds,
        admission: AdmissionController,
        *,
        limits: RouterLimits,
        apply_limits: Callable[[RouterLimits], None],
    ) -> None:
        self._dispatcher = dispatcher
        self._learning = learning
        self._table = table
        self._index = index
        self._feeds = feeds
        self._admission = admission
        self._apply_limits = apply_limits
        self.limits = limits
        #: Whether weights are frozen: no model is trained or adopted meanwhile.
        self.frozen = False
        self._count_progress()
        self._bound_routes()

    @property
    def policy(self) -> Policy:
        """The policy that chooses."""
        return self._dispatcher.policy

    @property
    def weights(self) -> Weights:
        """The weights of the next decision."""
        return self._dispatcher.weights

    @property
    def shadow(self) -> Policy | None:
        """The policy that scores decisions and makes none."""
        return self._dispatcher.shadow

    def set_weights(self, weights: Weights, *, now: float) -> None:
        """Use `weights` from the next decision on. The caller has checked and versioned them (`Weights.changed`)."""
        assert set(weights) == {spec.name for spec in self.policy.weight_specs}
        self._dispatcher.weights = weights

    def set_policy(self, policy: Policy, weights: Weights, *, now: float) -> None:
        """Route by another policy from the next decision on; requests in flight are not moved.

        Raises `ConfigError` if it and the shadow policy read different prefix indexes or both learn, and changes
        nothing. A policy that learns starts without a model.
        """
        kind = required_index(policy, self.shadow)
        self._learning.set_policies(policy, self.shadow)
        self._count_progress()
        self._dispatcher.policy = policy
        self._bound_routes()
        self.set_weights(weights, now=now)
        self._use_index(kind)
        self._admission.needs_drain = True

    def validate_policy(self, policy: Policy) -> None:
        """Raise `ConfigError` if `policy` cannot route beside the shadow policy in force."""
        required_index(policy, self.shadow)
        find_learner(policy, self.shadow)

    def set_shadow(self, policy: Policy | None, *, now: float) -> None:
        """Score decisions by another shadow policy, or by none. Raises as the Router's constructor does."""
        if policy is not None:
            validate_shadow(self.policy, policy)
        self._learning.set_policies(self.policy, policy)
        self._count_progress()
        self._dispatcher.set_shadow(policy)
        self._bound_routes()
        self._use_index(required_index(self.policy, policy))

    def record_outcomes(self, recorder: OutcomeRecorder | None) -> None:
        """Pass each attempt that is dispatched from now on to a log when it ends, or none."""
        self._learning.recorder = recorder
        self._count_progress()

    def set_limits(self, limits: RouterLimits, *, now: float) -> None:
        """Replace the limits; the number of retained decisions and samples stays."""
        self.limits = limits
        self._apply_limits(limits)
        self._bound_routes()

    def route_stats(self, *, now: float) -> RouteStats | None:
        """Return the routes of the policy in force; `None` for one without routes of its own."""
        return self.policy.route_stats(now=now) if isinstance(self.policy, HasRoutes) else None

    def _bound_routes(self) -> None:
        """Hand the bounds of routes to the policies that have some."""
        policies: tuple[object, ...] = (self.policy, self.shadow)
        for policy in policies:
            if isinstance(policy, HasRoutes):
                policy.set_route_limits(self.limits.max_routes, self.limits.route_ttl_s)

    def _use_index(self, kind: IndexKind) -> None:
        self._index.bounded = kind != "published"
        self._feeds.used = kind == "events"

    def _count_progress(self) -> None:
        self._table.count_progress(self._learning.reads_progress)


# What operators, metrics and handlers read of a Router: replicas, models, health, and the newest decisions.


class RouterView:
    """Reads of a Router; none of them changes anything.

    Parameters
    ----------
    fleet, table, slow_start, regions:
        The Router's replicas, with what is in flight there, their ramps and the regions that are cut off.
    index, found_shares, prefix_updater:
        What is known of their caches.
    dispatcher:
        Has the retained decisions.
    poison:
        Has the prompts that replicas went down under.
    admission, samples:
        Have the requests that wait, and those that have ended.
    """

    def __init__(
        self,
        fleet: Fleet,
        table: InFlightTable,
        slow_start: SlowStart,
        regions: RegionOutages,
        index: PrefixIndex,
        found_shares: FoundShares,
        prefix_updater: PrefixUpdater,
        dispatcher: Dispatcher,
        poison: PoisonPrompts,
        admission: AdmissionController,
        samples: SampleRing,
    ) -> None:
        self._fleet = fleet
        self._table = table
        self._slow_start = slow_start
        self._regions = regions
        self._index = index
        self._found_shares = found_shares
        self._prefix_updater = prefix_updater
        self._dispatcher = dispatcher
        self._poison = poison
        self._admission = admission
        self._samples = samples

    def snapshots(self, *, now: float) -> list[ReplicaSnapshot]:
        """Return a row per replica, in the order in which they joined."""
        overdue, replicas = self._table.overdue(now=now), self._fleet.replicas.values()
        slowdowns = _decode_slowdowns(replicas)
        return [self._snapshot(each, overdue.get(each, []), slowdowns.get(each), now) for each in replicas]

    def has_short_queue(self, *, backlog_s: float, now: float) -> bool:
        """Return whether an eligible replica has at most so much prefill ahead, s; cheaper than the whole view."""
        columns, eligibility = self._fleet.columns, self._fleet.eligibility
        return any(
            max(0.0, float(columns.drained_at_s[each.slot]) - now - one_way_s(columns, each.slot)) <= backlog_s
            and each in eligibility.for_model(each.models[0] if each.models else "")
            for each in self._fleet.replicas.values()
        )

    def overdue_replicas(self, *, now: float) -> list[str]:
        """Return the replicas with overdue requests; cheaper than the whole view."""
        return [replica.spec.name for replica in self._table.overdue(now=now) if replica.slot >= 0]

    def health_states(self) -> dict[str, str]:
        """Return `healthy`, `ejected` or `half_open` per replica; cheaper than the whole view."""
        return {name: replica.health.state.value for name, replica in self._fleet.replicas.items()}

    def draining(self) -> frozenset[str]:
        """Return the names of the draining replicas; cheaper than the whole view."""
        return frozenset(name for name, replica in self._fleet.replicas.items() if replica.draining)

    @property
    def unreachable_regions(self) -> frozenset[str]:
        """Regions in which no replica answers a probe."""
        return self._regions.unreachable

    def lists(self, model: str | None) -> bool:
        """Return whether some replica serves `model` by name."""
        return self._fleet.eligibility.lists(model)

    def serves(self, model: str | None) -> bool:
        """Return whether some replica would be sent a request for `model`, healthy or not."""
        return self._fleet.eligibility.serves(model)

    def serves_beside(self, model: str | None, replica: str) -> bool:
        """Return whether another replica than `replica` would be sent a request for `model`, healthy or not."""
        others = self._fleet.replicas.keys() - {replica}
        return self._fleet.eligibility.has_replica_of(frozenset(others), model)

    def models(self) -> dict[str, frozenset[str]]:
        """Return the models that replicas list, and the regions in which each is served."""
        return self._fleet.eligibility.regions_of_models()

    def poison_prompts(self, *, now: float) -> list[PoisonPrompt]:
        """Return the prompts that no replica is sent, because replicas went down under them."""
        return self._poison.all(now=now)

    def decisions(self, request_id: str) -> list[Decision]:
        """Return the retained decisions for a request, first attempt first."""
        return self._dispatcher.decisions(request_id)

    def newest_decisions(self, limit: int) -> list[Decision]:
        """Return the last decisions, newest first."""
        return self._dispatcher.newest_decisions(limit)

    def scaling_evidence(self, *, now: float) -> dict[Group, GroupEvidence]:
        """Return what is known of each group of replicas that is scaled as one."""
        waiting: dict[str | None, float] = {}
        for queued in self._admission.queue.requests.values():
            waiting[queued.preferred] = waiting.get(queued.preferred, 0.0) + queued.prefill_s
        groups: dict[Group, list[Replica]] = {}
        for replica in self._fleet.replicas.values():
            groups.setdefault(_group(replica), []).append(replica)
        columns = self._fleet.all_loads(now=now)
        return {group: _evidence(members, self._fleet, columns, waiting, now) for group, members in groups.items()}

    def served_since(self, seq: int, *, limit: int) -> dict[Group, list[ServedRequest]]:
        """Return the newest requests after sample `seq` that had a first token, oldest first, by their group."""
        served: dict[Group, list[ServedRequest]] = {}
        newest = self._samples.newest(min(max(self._samples.last_seq - seq, 0), limit))
        for sample in reversed(newest):
            replica, parts = self._fleet.replicas.get(sample.replica), sample.ttft_parts_ms
            if replica is None or parts is None or sample.ttft_ms is None:
                continue
            prefill_s, ttft_s = parts["prefill"] / 1e3, sample.ttft_ms / 1e3
            served.setdefault(_group(replica), []).append(
                ServedRequest(
                    arrived_s=sample.finished_s - sample.e2e_s,
                    prefill_s=prefill_s,
                    network_s=parts["network"] / 1e3,
                    stay_s=sample.e2e_s - ttft_s + prefill_s,
                    ttft_s=ttft_s,
                )
            )
        return served

    def _snapshot(
        self, replica: Replica, overdue: Sequence[tuple[float, Attempt]], decode_slowdown: float | None, now: float
    ) -> ReplicaSnapshot:
        return snapshot_replica(
            self._fleet,
            self._slow_start,
            replica,
            index_blocks=self._index.resident_blocks(replica.slot),
            block_tokens=self._prefix_updater.block_tokens,
            found_share=self._found_shares.recent(replica.slot),
            decode_slowdown=decode_slowdown,
            overdue=[(overdue_s, attempt.request.request_id) for overdue_s, attempt in overdue],
            now=now,
        )


def _group(replica: Replica) -> Group:
    models = replica.models
    return Group(replica.spec.region, models[0] if models else None)


def _evidence(
    members: Sequence[Replica], fleet: Fleet, columns: Columns, waiting: Mapping[str | None, float], now: float
) -> GroupEvidence:
    """Return what is known of the replicas of a group; `columns` have the load of all routers."""
    own_columns, slots = fleet.columns, [each.slot for each in members]
    serving = [each for each in members if not each.draining and each.health.state is HealthState.HEALTHY]
    shares = zip(own_columns.prefill_share[slots].tolist(), own_columns.prefill_share_s[slots].tolist(), strict=True)
    drained_s = zip(slots, columns.drained_at_s[slots].tolist(), strict=True)
    requests, tokens = float(columns.in_flight_requests[slots].sum()), float(columns.in_flight_tokens[slots].sum())
    bounds = (
        own_columns.max_running_requests[slots],
        own_columns.kv_capacity_tokens[slots] * requests / max(tokens, 1.0),
    )
    mean_bounds = [float(np.nanmean(each)) for each in bounds if not np.isnan(each).all()]
    return GroupEvidence(
        replicas=len(serving),
        work=sum(faded(share, now - since_s) for share, since_s in shares),
        shed_s=sum(each.shed_prefill_s for each in members),
        own_requests=float(own_columns.in_flight_requests[slots].sum()),
        requests=requests,
        backlog_s=sum(max(0.0, at_s - now - one_way_s(own_columns, slot)) for slot, at_s in drained_s)
        + sum(waiting.get(each.spec.name, 0.0) for each in members),
        prefills=max((each.prefill_queue.speed.parallel.count for each in serving), default=1),
        slots=min([each for each in mean_bounds if each >= 1.0], default=inf),
    )


def _decode_slowdowns(replicas: Iterable[Replica]) -> dict[Replica, float | None]:
    """Return how much slower each replica decodes than the others with its models and accelerator."""
    alike: dict[tuple[frozenset[str], str | None], list[tuple[Replica, float]]] = {}
    for replica in replicas:
        if (tpot_s := replica.decode_times.tpot_s) is not None:
            alike.setdefault((frozenset(replica.models), replica.spec.accelerator), []).append((replica, tpot_s))
    slowdowns: dict[Replica, float | None] = {}
    for group in alike.values():
        slowdowns |= zip(
            (replica for replica, _ in group), relative_to_others([tpot_s for _, tpot_s in group]), strict=True
        )
    return slowdowns


# What a Router learns of its replicas: the fleet and its changes, probes, scrapes, connections and models.
#
# Owns what each of them sets off in the Router's parts. Their caches are `caches`, the reports of peers `peers.group`.


class RouterReplicas:
    """Events of a Router's replicas. A report of a replica that has left is ignored.

    Parameters
    ----------
    fleet, table, request_filter, regions, admission, peers:
        The Router's.
    index, feeds, prefix_updater:
        What is known of the replicas' caches: a replica that has restarted has none of it.
    poison:
        Takes replicas that were found down.
    drain_queue:
        Dispatches or rejects queued requests, for which a replica may have capacity now, and returns the actions.
    """

    def __init__(
        self,
        fleet: Fleet,
        table: InFlightTable,
        request_filter: RequestFilter,
        regions: RegionOutages,
        admission: AdmissionController,
        peers: PeerGroup,
        *,
        index: PrefixIndex,
        feeds: KvFeeds,
        prefix_updater: PrefixUpdater,
        poison: PoisonPrompts,
        drain_queue: Callable[[float], list[Action]],
    ) -> None:
        self._fleet = fleet
        self._table = table
        self._filter = request_filter
        self._regions = regions
        self._admission = admission
        self._peers = peers
        self._index = index
        self._feeds = feeds
        self._prefix_updater = prefix_updater
        self._poison = poison
        self._drain_queue = drain_queue

    # -- the fleet

    def set_fleet(self, replicas: Sequence[ReplicaSpec], *, now: float) -> None:
        """Replace the fleet. A replica that stays keeps load, health and index; one that leaves may finish attempts.

        Raises `ConfigError` if two have one name.
        """
        was_empty = not self._fleet.replicas
        change = self._fleet.replace(replicas)
        self._prefix_updater.on_fleet_change(change)
        self._table.on_fleet_change(change)
        self._peers.on_fleet_change(change)
        self._regions.on_fleet_change()
        self._poison.forget_left()
        self._filter.on_fleet_change(() if was_empty else change.joined, now=now)
        self._admission.needs_drain = True

    def drain(self, replica: str, draining: bool = True, *, now: float) -> None:
        """Dispatch no new request to a replica, or allow it again. Raises `UnknownReplica`."""
        self._fleet.drain(replica, draining, now=now)
        self._admission.needs_drain = True

    def warm(self, replica: str, warming: bool = True) -> None:
        """Dispatch to others while a replica is warmed, if there are any; or as to any, again."""
        member = self._fleet.replicas.get(replica)
        if member is None:
            return
        if warming:
            self._fleet.warming[member] = None
        else:
            self._fleet.warming.pop(member, None)
        self._admission.needs_drain = True

    @property
    def any_answers(self) -> bool:
        """Whether the last probe of some replica was answered."""
        return any(replica.answers for replica in self._fleet.replicas.values())

    # -- reports of one

    def on_probe(
        self, replica: str, rtt_s: float | None, *, now: float, refusal: int | None = None, cause: str | None = None
    ) -> list[Action]:
        """Record a probe's round trip, s, `None` if it failed; `refusal` is the 4xx of a failed one.

        `cause` is why it failed, in words.
        """
        member = self._fleet.replicas.get(replica)
        if member is not None:
            member.probe_refusal = refusal
            if rtt_s is None and cause is not None:
                member.last_failure = cause
            self._fleet.probed(member, rtt_s, now=now)
            if rtt_s is None:
                if refusal is None:
                    self._poison.on_down(member, now=now)
                self._regions.probe_failed(member, now=now)
            else:
                self._regions.probe_succeeded(member, now=now)
        return self._drain_queue(now)

    def on_connection(self, replica: str, connection: OpenConnection | None, *, now: float) -> list[Action]:
        """Record the connection of the next request to a replica, `None` if it has to open one.

        Where a shell never reports, every request counts as one round trip.
        """
        member = self._fleet.replicas.get(replica)
        if member is not None:
            record_connection(self._fleet.columns, member.slot, connection)
        return []

    def on_engine_sample(self, replica: str, sample: EngineSample | None, *, now: float) -> list[Action]:
        """Record a scrape, `None` if it failed: the last values then count until they are stale."""
        member = self._fleet.replicas.get(replica)
        if member is not None and sample is not None:
            self._fleet.scraped(member, sample, now=now)
            if member.restarts.observe(sample):
                self._poison.on_down(member, now=now)
                self._forget_cache(member)
            self._feeds.scraped(member.slot)
            self._prefix_updater.resize(member)
        return []

    def on_replaced(self, replica: str, *, now: float) -> list[Action]:
        """Record that another process answers in the place of a replica's: its name has moved. Its cache is another."""
        member = self._fleet.replicas.get(replica)
        if member is not None:
            member.restarts.replaced()
            self._forget_cache(member)
        return []

    def _forget_cache(self, member: Replica) -> None:
        self._index.flush(member.slot)
        self._peers.flush(member.slot)
        self._feeds.restarted(member.slot)
        self._fleet.events.append(ReplicaRestarted(member.spec.name, member.spec.region))

    def on_models(
        self,
        replica: str,
        models: tuple[str, ...],
        *,
        contexts: Mapping[str, int] = MappingProxyType({}),
        now: float,
    ) -> list[Action]:
        """Record the models that an engine lists, and the contexts of those for which it says one, tokens."""
        member = self._fleet.replicas.get(replica)
        if member is not None:
            self._fleet.list_models(member, models, contexts)
            self._admission.needs_drain = True
        return self._drain_queue(now)


# What a Router learns of its replicas' caches: KV events, pushed snapshots and evictions, and feeds that are lost.
#
# Owns the step from a report to the feeds and the history (`core.prefix`). A report of a replica that has left is
# ignored. None of them makes a request due.


#: Models with retained block sizes: clients choose names.
_MAX_MODELS = 64


class RouterCaches:
    """Reports of the caches of a Router's replicas.

    Parameters
    ----------
    fleet, feeds, index, peers:
        The Router's.
    accuracy:
        How right each source of cached tokens was.
    dispatcher:
        Has the policies, which may need hashes of blocks themselves.
    """

    def __init__(
        self,
        fleet: Fleet,
        feeds: KvFeeds,
        index: PrefixIndex,
        peers: PeerGroup,
        accuracy: CacheAccuracy,
        dispatcher: Dispatcher,
    ) -> None:
        self._fleet = fleet
        self._feeds = feeds
        self._index = index
        self._peers = peers
        self._accuracy = accuracy
        self._dispatcher = dispatcher
        #: Block sizes by model, until feeds or models change.
        self._sizes: dict[str | None, frozenset[int]] = {}
        self._sizes_changes = (0, 0)

    def on_kv_events(
        self, replica: str, batch: KvEventBatch, *, model: str | None, block_tokens: int, complete: bool, now: float
    ) -> list[Action]:
        """Apply the KV events of a replica.

        `model` is `None` for the only one of its replica, adapters included. `complete` is false while the feed may
        lack blocks: it joined a cache in use. The better of it and the history then counts.
        """
        member = self._fleet.replicas.get(replica)
        if member is not None:
            feeds, slot = self._feeds, member.slot
            cleared = feeds.apply(slot, batch, model=model, block_tokens=block_tokens, complete=complete, now=now)
            if cleared:
                self._index.flush(slot)
        return []

    def on_kv_lost(self, replica: str, *, now: float) -> list[Action]:
        """Forget a replica's events: the feed is lost, or has a gap. The history counts until events come again."""
        member = self._fleet.replicas.get(replica)
        if member is not None:
            self._feeds.lose_events(member.slot)
        return []

    def on_warmed(self, replica: str, blocks: bytes) -> None:
        """Add a prompt that no client sent: the replica has computed it."""
        member = self._fleet.replicas.get(replica)
        if member is not None:
            self._index.confirm(blocks, member.slot)

    def forget_some(self, replica: str, *, blocks: int, now: float) -> bool:
        """Begin `on_kv_lost` with up to `blocks` of the replica's blocks; return whether there were any."""
        member = self._fleet.replicas.get(replica)
        return member is not None and self._feeds.flush_some(member.slot, blocks=blocks, source="events") > 0

    def clear_some(self, replica: str, *, model: str | None, rank: int, blocks: int, now: float) -> bool:
        """Begin to apply a `CacheCleared` of a rank with up to `blocks` blocks; return whether there were any."""
        member = self._fleet.replicas.get(replica)
        if member is None:
            return False
        removed, whole = self._feeds.clear_some(member.slot, model=model, rank=rank, blocks=blocks)
        if whole and not removed:
            removed = self._index.flush_some(member.slot, blocks=blocks)
        return removed > 0

    def flush(self, replica: str | None = None, *, now: float) -> None:
        """Forget what is known of the cache of one replica or of all. Raises `UnknownReplica`."""
        members = self._fleet.replicas.values() if replica is None else (self._fleet.member(replica),)
        for member in members:
            self._index.flush(member.slot)
            self._peers.flush(member.slot)
            self._feeds.flush(member.slot)

    def flush_some(self, replica: str, *, blocks: int, now: float) -> bool:
        """Begin `flush` with about `blocks` of the replica's blocks; return whether there were any."""
        member = self._fleet.replicas.get(replica)
        if member is None:
            return False
        removed = self._index.flush_some(member.slot, blocks=blocks)
        return removed + self._feeds.flush_some(member.slot, blocks=blocks) > 0

    def on_snapshot(self, replica: str, snapshot: CacheSnapshot, *, now: float) -> list[Action]:
        """Replace the pushed blocks of a replica; ignored while it sends events."""
        member = self._fleet.replicas.get(replica)
        if member is not None:
            self._feeds.replace(member.slot, snapshot, now=now)
        return []

    def on_evictions(self, replica: str, evictions: CacheEvictions, *, now: float) -> list[Action]:
        """Remove evicted blocks of a replica's snapshot; ignored without one."""
        member = self._fleet.replicas.get(replica)
        if member is not None:
            self._feeds.evict(member.slot, evictions, now=now)
        return []

    def on_changes(self, replica: str, changes: CacheChanges, *, now: float) -> list[Action]:
        """Apply a part of the difference to the last snapshot of a replica; ignored without one."""
        member = self._fleet.replicas.get(replica)
        if member is not None:
            self._feeds.change(member.slot, changes, now=now)
        return []

    def on_push_lost(self, replica: str, *, now: float) -> list[Action]:
        """Forget a replica's pushes: they have ended. The history counts until it pushes again."""
        member = self._fleet.replicas.get(replica)
        if member is not None:
            self._feeds.drop(member.slot, "push")
        return []

    def pushed_feed(self, replica: str, model: str | None, block_tokens: int) -> PushedFeed | None:
        """Return what a replica has pushed of a model; `None` if it has not, or its events count instead."""
        member = self._fleet.replicas.get(replica)
        feed = None if member is None else self._feeds.pushed(member.slot, model, block_tokens)
        if member is None or feed is None:
            return None
        return PushedFeed(feed.number, feed.index.pushed.reported(member.slot))

    def sources(self, *, now: float) -> dict[str, CacheSourceStats]:
        """Return the source of each replica's cached tokens, and how right it was."""
        return {
            name: self._accuracy.stats(replica.slot, self._feeds, now=now)
            for name, replica in self._fleet.replicas.items()
        }

    def has_reports(self, replica: str) -> bool:
        """Return whether a replica has reported its cache, and the report counts still."""
        member = self._fleet.replicas.get(replica)
        return member is not None and self._feeds.newest(member.slot) is not None

    @property
    def read_reports(self) -> bool:
        """Return whether decisions read reports: the policy in force has an index of kind `events`."""
        return self._feeds.used

    def block_sizes(self, model: str | None) -> frozenset[int]:
        """Return the block sizes for which a request for `model` needs hashes: of feeds and of policies."""
        feeds, eligibility = self._feeds, self._fleet.eligibility
        policy_sizes = hashed_block_sizes(self._dispatcher.policy, self._dispatcher.shadow)
        if not feeds.changes:
            return policy_sizes
        changes = feeds.changes, eligibility.models_changes
        if changes != self._sizes_changes or len(self._sizes) >= _MAX_MODELS:
            self._sizes, self._sizes_changes = {}, changes
        sizes = self._sizes.get(model)
        if sizes is None:
            sizes = self._sizes[model] = feeds.block_sizes(eligibility.slots_serving(model), model)
        return sizes | policy_sizes if policy_sizes else sizes
