"""The parts of a Router: how they are built, and which of its limits each of them gets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gorgo.core.admission.controller import AdmissionController
from gorgo.core.admission.preconditions import Preconditions
from gorgo.core.dispatch.cache_accuracy import CacheAccuracy
from gorgo.core.dispatch.dispatcher import Dispatcher
from gorgo.core.dispatch.hedging import Hedger
from gorgo.core.dispatch.in_flight import InFlightTable
from gorgo.core.dispatch.lifecycle import RequestLifecycle
from gorgo.core.dispatch.prefix_updates import PrefixUpdater
from gorgo.core.fleet.busy import BusyPauses
from gorgo.core.fleet.fleet import Fleet
from gorgo.core.fleet.refused_kinds import RefusedKinds
from gorgo.core.fleet.region_outage import RegionOutages
from gorgo.core.fleet.request_filter import RequestFilter
from gorgo.core.fleet.short_answers import ShortAnswers
from gorgo.core.fleet.slow_start import SlowStart
from gorgo.core.fleet.spec import ReplicaSpec
from gorgo.core.limits import RouterLimits
from gorgo.core.messages.samples import SampleRing
from gorgo.core.policy.interface import Policy
from gorgo.core.policy.shadow import required_index, validate_shadow
from gorgo.core.policy.weights import Weights
from gorgo.core.prefix.answers import Answers
from gorgo.core.prefix.found_share import FoundShares
from gorgo.core.prefix.index import PrefixIndex
from gorgo.core.prefix.kv_feeds import KvFeeds
from gorgo.core.quotas import ClientQuotas
from gorgo.core.training.learning import Learning


@dataclass(frozen=True, slots=True)
class RouterParts:
    """One fleet, one in-flight table and one prefix index, shared by all that work on them."""

    fleet: Fleet
    table: InFlightTable
    index: PrefixIndex
    found_shares: FoundShares
    feeds: KvFeeds
    cache_accuracy: CacheAccuracy
    samples: SampleRing
    filter: RequestFilter
    dispatcher: Dispatcher
    preconditions: Preconditions
    admission: AdmissionController
    hedger: Hedger
    lifecycle: RequestLifecycle
    prefix_updater: PrefixUpdater
    slow_start: SlowStart
    busy: BusyPauses
    refused_kinds: RefusedKinds
    short_answers: ShortAnswers
    regions: RegionOutages
    quotas: ClientQuotas
    learning: Learning

    def set_limits(self, limits: RouterLimits) -> None:
        """Hand other limits to every part; the number of retained decisions and samples stays."""
        self.fleet.set_limits(
            stale_after_s=limits.stale_after_s,
            rtt_ewma_alpha=limits.rtt_ewma_alpha,
            panic_threshold=limits.panic_threshold,
            ejection=limits.outlier,
        )
        self.dispatcher.set_limits(limits)
        self.admission.set_limits(limits.overload)
        self.hedger.set_limits(limits.hedging, max_attempts=limits.max_attempts)
        self.lifecycle.set_limits(limits)
        self.slow_start.ramp_s = limits.slow_start_s
        self.regions.window_s = limits.region_window_s
        self.quotas.set_rules(limits.clients)
        self.index.resize(limits.max_index_blocks)
        self.feeds.set_max_blocks(limits.max_index_blocks)
        self.prefix_updater.block_tokens = limits.block_tokens
        self.prefix_updater.resize_all()


def build_parts(
    replicas: Sequence[ReplicaSpec],
    policy: Policy,
    *,
    rng: np.random.Generator,
    boot_id: str,
    weights: Weights | None,
    limits: RouterLimits,
    shadow: Policy | None,
) -> RouterParts:
    """Build all parts. Parameters as in `Router`."""
    if shadow is not None:
        validate_shadow(policy, shadow)
    index_kind = required_index(policy, shadow)
    index = PrefixIndex(max_blocks=limits.max_index_blocks, bounded=index_kind != "published")
    found_shares, answers, cache_accuracy = FoundShares(), Answers(), CacheAccuracy()
    feeds = KvFeeds(max_blocks=limits.max_index_blocks, used=index_kind == "events")
    samples = SampleRing(boot_id, limits.max_samples)
    fleet = Fleet(
        stale_after_s=limits.stale_after_s,
        rtt_ewma_alpha=limits.rtt_ewma_alpha,
        panic_threshold=limits.panic_threshold,
        ejection=limits.outlier,
    )
    table = InFlightTable(fleet)
    slow_start = SlowStart(fleet, ramp_s=limits.slow_start_s)
    busy, refused_kinds, short_answers = BusyPauses(), RefusedKinds(), ShortAnswers()
    request_filter = RequestFilter(fleet, slow_start, busy, refused_kinds, short_answers)
    learning = Learning(policy, shadow)
    dispatcher = Dispatcher(
        fleet,
        table,
        index,
        found_shares,
        answers,
        feeds,
        policy=policy,
        weights=Weights.of(policy.weight_specs, version=1) if weights is None else weights,
        rng=rng,
        shadow=shadow,
        learning=learning,
        limits=limits,
    )
    admission = AdmissionController(fleet, dispatcher, request_filter, limits.overload)
    prefix_updater = PrefixUpdater(
        index, fleet, found_shares, answers, feeds, cache_accuracy, block_tokens=limits.block_tokens
    )
    quotas = ClientQuotas(limits.clients)
    parts = RouterParts(
        fleet=fleet,
        table=table,
        index=index,
        found_shares=found_shares,
        feeds=feeds,
        cache_accuracy=cache_accuracy,
        samples=samples,
        filter=request_filter,
        dispatcher=dispatcher,
        preconditions=Preconditions(fleet, request_filter, quotas),
        admission=admission,
        hedger=Hedger(
            dispatcher, admission.saturation, request_filter, limits.hedging, max_attempts=limits.max_attempts
        ),
        lifecycle=RequestLifecycle(
            dispatcher, prefix_updater, quotas, samples, request_filter, busy, refused_kinds, short_answers, limits
        ),
        prefix_updater=prefix_updater,
        slow_start=slow_start,
        busy=busy,
        refused_kinds=refused_kinds,
        short_answers=short_answers,
        regions=RegionOutages(fleet, window_s=limits.region_window_s),
        quotas=quotas,
        learning=learning,
    )
    prefix_updater.on_fleet_change(fleet.replace(replicas))
    return parts
