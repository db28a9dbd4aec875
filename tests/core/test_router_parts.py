"""The parts of a Router on their own: reports of caches, events of replicas, settings, and what is read of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gorgo.core.dispatch.in_flight import PoisonPrompts
from gorgo.core.latency.ttft import TcpWindows
from gorgo.core.limits import RouterLimits
from gorgo.core.messages.actions import ReplicaRestarted
from gorgo.core.messages.kv_events import (
    BlocksStored,
    CacheChanges,
    CacheCleared,
    CacheEvictions,
    CacheSnapshot,
    KvEvent,
    KvEventBatch,
    KvTier,
)
from gorgo.core.messages.request import EngineSample, OpenConnection, SampleRing
from gorgo.core.policy.weights import Weights
from gorgo.core.prefix.kv_source import token_bytes
from gorgo.core.router_parts import RouterCaches, RouterReplicas, RouterSettings, RouterView
from gorgo.errors import ConfigError, UnknownReplica
from gorgo.policies.registry import make_policy
from tests.core.learners import LeastPredicted
from tests.core.routers import PROMPT, Parts, a_request, make_parts, specs

# --- Reports of caches on their own: what each of them leaves in the feeds and in the history.


STORED = BlocksStored((1, 2, 3, 4), None, token_bytes(range(64)), 16, KvTier.GPU)


@pytest.fixture
def parts() -> Parts:
    return make_parts("a", "b")


def caches_of(parts: Parts) -> RouterCaches:
    return RouterCaches(parts.fleet, parts.feeds, parts.index, parts.peers, parts.accuracy, parts.dispatcher)


def blocks_of_feeds(parts: Parts, name: str = "a") -> int:
    return parts.feeds.blocks(parts.fleet.member(name).slot)


def history_of(parts: Parts, name: str = "a") -> int:
    return parts.index.resident_blocks(parts.fleet.member(name).slot)


def report(caches: RouterCaches, *events: KvEvent, replica: str = "a") -> None:
    batch = KvEventBatch(sent_s=None, rank=0, events=events)
    caches.on_kv_events(replica, batch, model=None, block_tokens=16, complete=True, now=0.0)


def test_events_count_until_the_feed_is_lost(parts: Parts) -> None:
    caches = caches_of(parts)
    report(caches, STORED)
    assert (blocks_of_feeds(parts), caches.block_sizes(None)) == (4, frozenset({16}))
    assert caches.sources(now=1.0)["a"].source == "events"
    caches.on_kv_lost("a", now=1.0)
    assert (blocks_of_feeds(parts), caches.block_sizes(None)) == (0, frozenset())
    assert caches.sources(now=1.0)["a"].source != "events"


def test_a_whole_cleared_cache_empties_the_history_too(parts: Parts) -> None:
    caches = caches_of(parts)
    parts.index.confirm(PROMPT, parts.fleet.member("a").slot)
    report(caches, STORED)
    assert history_of(parts) == 4
    report(caches, CacheCleared())
    assert (blocks_of_feeds(parts), history_of(parts)) == (0, 0)


def test_a_flush_of_one_leaves_the_others_and_one_of_all_leaves_none(parts: Parts) -> None:
    caches = caches_of(parts)
    for name in "ab":
        parts.index.confirm(PROMPT, parts.fleet.member(name).slot)
        report(caches, STORED, replica=name)
    caches.flush("a", now=0.0)
    assert [(history_of(parts, name), blocks_of_feeds(parts, name)) for name in "ab"] == [(0, 0), (4, 4)]
    caches.flush(now=0.0)
    assert [(history_of(parts, name), blocks_of_feeds(parts, name)) for name in "ab"] == [(0, 0), (0, 0)]
    with pytest.raises(UnknownReplica, match="'z'"):
        caches.flush("z", now=0.0)


def test_a_flush_in_slices_removes_as_many_blocks_as_it_may_until_there_are_none(parts: Parts) -> None:
    caches = caches_of(parts)
    report(caches, STORED)
    before = blocks_of_feeds(parts)
    assert caches.flush_some("a", blocks=3, now=0.0)
    assert 0 < blocks_of_feeds(parts) < before
    while caches.flush_some("a", blocks=3, now=0.0):
        pass
    assert (blocks_of_feeds(parts), caches.forget_some("a", blocks=3, now=0.0)) == (0, False)


def test_pushes_are_replaced_evicted_changed_and_lost(parts: Parts) -> None:
    caches = caches_of(parts)
    caches.on_snapshot("a", CacheSnapshot("m", 16, [1, 2, 3]), now=0.0)
    feed = caches.pushed_feed("a", "m", 16)
    assert feed is not None
    assert feed.reported_blocks == 3
    caches.on_evictions("a", CacheEvictions("m", 16, [3]), now=1.0)
    caches.on_changes("a", CacheChanges("m", 16, added=[4], removed=[1], whole=True), now=2.0)
    assert blocks_of_feeds(parts) == 2
    caches.on_push_lost("a", now=3.0)
    assert (blocks_of_feeds(parts), caches.pushed_feed("a", "m", 16)) == (0, None)


def test_a_report_of_a_replica_that_has_left_is_ignored(parts: Parts) -> None:
    caches = caches_of(parts)
    report(caches, STORED, replica="z")
    caches.on_snapshot("z", CacheSnapshot("m", 16, [1]), now=0.0)
    caches.on_evictions("z", CacheEvictions("m", 16, [1]), now=0.0)
    caches.on_changes("z", CacheChanges("m", 16, added=[1], removed=[], whole=True), now=0.0)
    caches.on_kv_lost("z", now=0.0)
    caches.on_push_lost("z", now=0.0)
    assert not caches.forget_some("z", blocks=1, now=0.0)
    assert not caches.clear_some("z", model=None, rank=0, blocks=1, now=0.0)
    assert not caches.flush_some("z", blocks=1, now=0.0)
    assert (caches.pushed_feed("z", "m", 16), parts.feeds.changes) == (None, 0)


# --- Events of replicas on their own: what each of them sets off in the parts.


@pytest.fixture
def parts_replicas() -> Parts:
    return make_parts("a", "b", slow_start_s=7.0)


def replicas_of(parts: Parts) -> RouterReplicas:
    return RouterReplicas(
        parts.fleet,
        parts.table,
        parts.request_filter,
        parts.regions,
        parts.admission,
        parts.peers,
        index=parts.index,
        feeds=parts.feeds,
        prefix_updater=parts.prefix_updater,
        poison=PoisonPrompts(),
        drain_queue=parts.drain_queue,
    )


def test_probes_smooth_the_round_trip_and_drain_the_queue(parts_replicas: Parts) -> None:
    replicas, member = replicas_of(parts_replicas), parts_replicas.fleet.member("a")
    replicas.on_probe("a", 0.02, now=1.0)
    assert parts_replicas.fleet.columns.rtt_s[member.slot] == pytest.approx(0.7 * 0.01 + 0.3 * 0.02)
    for second in (2.0, 3.0, 4.0):
        replicas.on_probe("a", None, refusal=401, now=second)
    assert (member.probe_refusal, member.health.state.value) == (401, "ejected")
    assert parts_replicas.regions.unreachable == {"region-of-a"}
    assert parts_replicas.drained_s == [1.0, 2.0, 3.0, 4.0]
    replicas.on_probe("z", 0.02, now=5.0)
    assert "z" not in parts_replicas.fleet.replicas


def test_a_restart_empties_what_is_known_of_the_cache_and_is_reported_to_the_shell(parts_replicas: Parts) -> None:
    replicas, slot = replicas_of(parts_replicas), parts_replicas.fleet.member("a").slot
    parts_replicas.index.confirm(PROMPT, slot)
    parts_replicas.feeds.replace(slot, CacheSnapshot("m", 16, [1, 2]), now=0.0)
    replicas.on_engine_sample("a", EngineSample(prompt_tokens_total=900.0), now=1.0)
    assert (parts_replicas.index.resident_blocks(slot), parts_replicas.feeds.blocks(slot)) == (4, 2)
    replicas.on_engine_sample("a", EngineSample(prompt_tokens_total=20.0), now=2.0)
    assert (parts_replicas.index.resident_blocks(slot), parts_replicas.feeds.blocks(slot)) == (0, 0)
    assert list(parts_replicas.fleet.events) == [ReplicaRestarted("a", "region-of-a")]
    assert not parts_replicas.drained_s, "a scrape gives no replica capacity"


def test_a_failed_scrape_leaves_the_last_values(parts_replicas: Parts) -> None:
    replicas, slot = replicas_of(parts_replicas), parts_replicas.fleet.member("a").slot
    replicas.on_engine_sample("a", EngineSample(running_requests=3), now=1.0)
    replicas.on_engine_sample("a", None, now=2.0)
    assert parts_replicas.fleet.columns.running_requests[slot] == 3


def test_a_connection_is_in_the_columns_until_there_is_none(parts_replicas: Parts) -> None:
    replicas, slot = replicas_of(parts_replicas), parts_replicas.fleet.member("a").slot
    replicas.on_connection("a", OpenConnection(TcpWindows(), 0.0), now=1.0)
    assert parts_replicas.fleet.columns.cwnd_bytes[slot] > 0.0
    replicas.on_connection("a", None, now=2.0)
    assert parts_replicas.fleet.columns.cwnd_bytes[slot] == 0.0


def test_models_that_an_engine_lists_may_free_a_queued_request(parts_replicas: Parts) -> None:
    replicas = replicas_of(parts_replicas)
    replicas.on_models("a", ("m",), now=1.0)
    assert parts_replicas.fleet.eligibility.lists("m")
    assert (parts_replicas.admission.needs_drain, parts_replicas.drained_s) == (True, [1.0])


def test_a_drained_replica_gets_no_new_request(parts_replicas: Parts) -> None:
    replicas = replicas_of(parts_replicas)
    replicas.drain("a", now=0.0)
    assert parts_replicas.dispatch(a_request("first"), now=0.0).replica == "b"
    replicas.drain("a", False, now=0.0)
    assert parts_replicas.dispatch(a_request("second"), now=0.0).replica == "a"
    with pytest.raises(UnknownReplica, match="'z'"):
        replicas.drain("z", now=0.0)


def test_a_replaced_fleet_forgets_who_left_and_starts_who_joined_slowly(parts_replicas: Parts) -> None:
    replicas = replicas_of(parts_replicas)
    parts_replicas.index.confirm(PROMPT, parts_replicas.fleet.member("a").slot)
    replicas.set_fleet(specs("b", "c"), now=1.0)
    slow_start = parts_replicas.request_filter.slow_start
    allowed = {name: slow_start.allowed(member, now=1.0) for name, member in parts_replicas.fleet.replicas.items()}
    assert allowed == {"b": float("inf"), "c": 2.0}
    assert parts_replicas.index.stored_blocks == 0
    with pytest.raises(ConfigError, match="same name"):
        replicas.set_fleet(specs("b", "b"), now=2.0)


def test_the_first_fleet_of_all_starts_at_full_speed() -> None:
    parts = make_parts(slow_start_s=7.0)
    replicas_of(parts).set_fleet(specs("a"), now=1.0)
    assert parts.request_filter.slow_start.allowed(parts.fleet.member("a"), now=1.0) == float("inf")


# --- Settings of a Router on their own: what each of them changes in the parts that use it.


def settings_of(parts: Parts, applied: list[RouterLimits] | None = None) -> RouterSettings:
    return RouterSettings(
        parts.dispatcher,
        parts.learning,
        parts.table,
        parts.index,
        parts.feeds,
        parts.admission,
        limits=RouterLimits(),
        apply_limits=([] if applied is None else applied).append,
    )


def test_weights_are_those_of_the_next_decision() -> None:
    parts = make_parts("a", policy="gorgo")
    settings = settings_of(parts)
    weights = settings.weights.changed(settings.policy.weight_specs, {"w_rtt": 1.0})
    settings.set_weights(weights, now=1.0)
    assert settings.weights is weights
    assert parts.dispatch(a_request(), now=1.0).decision.weights_version == 2


def test_another_policy_decides_next_reads_its_own_index_and_drains_the_queue() -> None:
    parts = make_parts("a", policy="gorgo-ms")
    settings = settings_of(parts)
    policy = make_policy("gorgo")
    settings.set_policy(policy, Weights.of(policy.weight_specs, version=5), now=1.0)
    assert (settings.policy, settings.weights.version) == (policy, 5)
    assert (parts.index.bounded, parts.feeds.used, parts.admission.needs_drain) == (False, False, True)
    assert parts.dispatch(a_request(), now=1.0).decision.policy == "gorgo"


def test_a_policy_of_another_index_than_the_shadow_is_refused_and_changes_nothing() -> None:
    parts = make_parts("a", policy="gorgo")
    settings = settings_of(parts)
    settings.set_shadow(make_policy("gorgo"), now=0.0)
    before, weights = settings.policy, settings.weights
    other = make_policy("gorgo-ms")
    with pytest.raises(ConfigError, match="index"):
        settings.validate_policy(other)
    with pytest.raises(ConfigError, match="index"):
        settings.set_policy(other, Weights.of(other.weight_specs, version=2), now=0.0)
    assert (settings.policy, settings.weights) == (before, weights)
    assert not parts.admission.needs_drain
    settings.set_shadow(None, now=0.0)
    settings.validate_policy(other)
    assert settings.shadow is None


def test_a_policy_that_learns_counts_progress_and_one_that_does_not_no_longer_does() -> None:
    parts = make_parts("a")
    settings = settings_of(parts)
    learner, plain = LeastPredicted(), make_policy("nearest")
    for policy in (learner, plain, learner):
        settings.set_policy(policy, Weights.of(policy.weight_specs, version=2), now=0.0)
        assert (parts.fleet.member("a").token_gap is not None) == (policy is learner)


def test_limits_are_handed_to_the_parts_and_read_back() -> None:
    applied: list[RouterLimits] = []
    settings = settings_of(make_parts("a"), applied)
    limits = replace(settings.limits, max_in_flight=1)
    settings.set_limits(limits, now=0.0)
    assert (applied, settings.limits) == ([limits], limits)


# --- What is read of a Router, from its parts alone.


def view_of(parts: Parts) -> RouterView:
    return RouterView(
        parts.fleet,
        parts.table,
        parts.request_filter.slow_start,
        parts.regions,
        parts.index,
        parts.found_shares,
        parts.prefix_updater,
        parts.dispatcher,
        PoisonPrompts(),
        parts.admission,
        SampleRing("boot", 16),
    )


def test_a_row_has_the_load_the_ramp_and_the_blocks_of_its_replica() -> None:
    parts = make_parts("a", "b", slow_start_s=7.0)
    view = view_of(parts)
    parts.dispatch(a_request(prompt_tokens=256, blocks=PROMPT), now=0.0)
    parts.request_filter.slow_start.begin(parts.fleet.member("b"), now=0.0)
    a, b = view.snapshots(now=1.0)
    assert (a.name, a.in_flight_requests, a.in_flight_tokens, a.index_blocks) == ("a", 1, 256, len(PROMPT) // 8)
    assert (b.name, b.in_flight_requests, b.slow_start_for_s, b.slow_start_in_flight) == ("b", 0, 6.0, 4)


def test_health_regions_and_models_are_those_of_the_fleet() -> None:
    parts = make_parts("a", "b")
    view, a = view_of(parts), parts.fleet.member("a")
    parts.fleet.list_models(a, ("m",))
    parts.fleet.list_models(parts.fleet.member("b"), ("m", "n"))
    assert (view.lists("m"), view.lists("n"), view.lists("o")) == (True, True, False)
    assert view.models() == {"m": frozenset({"region-of-a", "region-of-b"}), "n": frozenset({"region-of-b"})}
    assert (view.health_states(), view.unreachable_regions) == ({"a": "healthy", "b": "healthy"}, frozenset())
    for second in (1.0, 2.0, 3.0):
        parts.fleet.probed(a, None, now=second)
        parts.regions.probe_failed(a, now=second)
    assert view.health_states() == {"a": "ejected", "b": "healthy"}
    assert view.unreachable_regions == {"region-of-a"}


def test_decisions_are_found_by_request_and_by_age() -> None:
    parts = make_parts("a")
    for name in ("first", "second"):
        parts.dispatch(a_request(name), now=0.0)
    view = view_of(parts)
    assert [each.request_id for each in view.newest_decisions(5)] == ["second", "first"]
    assert [each.request_id for each in view.newest_decisions(1)] == ["second"]
    assert [each.attempt for each in view.decisions("first")] == [1]


def test_reading_changes_nothing() -> None:
    parts = make_parts("a")
    parts.fleet.scraped(parts.fleet.member("a"), EngineSample(running_requests=3), now=0.0)
    view = view_of(parts)
    assert view.snapshots(now=1.0) == view.snapshots(now=1.0)
    assert not parts.drained_s
