"""Events of replicas on their own: what each of them sets off in the parts."""

from __future__ import annotations

import pytest

from gorgo.core.dispatch.in_flight import PoisonPrompts
from gorgo.core.latency.ttft import TcpWindows
from gorgo.core.messages.actions import ReplicaRestarted
from gorgo.core.messages.kv_events import CacheSnapshot
from gorgo.core.messages.request import EngineSample, OpenConnection
from gorgo.core.router_parts import RouterReplicas
from gorgo.errors import ConfigError, UnknownReplica
from tests.core.parts import Parts, make_parts
from tests.core.routers import PROMPT, a_request, specs


@pytest.fixture
def parts() -> Parts:
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


def test_probes_smooth_the_round_trip_and_drain_the_queue(parts: Parts) -> None:
    replicas, member = replicas_of(parts), parts.fleet.member("a")
    replicas.on_probe("a", 0.02, now=1.0)
    assert parts.fleet.columns.rtt_s[member.slot] == pytest.approx(0.7 * 0.01 + 0.3 * 0.02)
    for second in (2.0, 3.0, 4.0):
        replicas.on_probe("a", None, refusal=401, now=second)
    assert (member.probe_refusal, member.health.state.value) == (401, "ejected")
    assert parts.regions.unreachable == {"region-of-a"}
    assert parts.drained_s == [1.0, 2.0, 3.0, 4.0]
    replicas.on_probe("z", 0.02, now=5.0)
    assert "z" not in parts.fleet.replicas


def test_a_restart_empties_what_is_known_of_the_cache_and_is_reported_to_the_shell(parts: Parts) -> None:
    replicas, slot = replicas_of(parts), parts.fleet.member("a").slot
    parts.index.confirm(PROMPT, slot)
    parts.feeds.replace(slot, CacheSnapshot("m", 16, [1, 2]), now=0.0)
    replicas.on_engine_sample("a", EngineSample(prompt_tokens_total=900.0), now=1.0)
    assert (parts.index.resident_blocks(slot), parts.feeds.blocks(slot)) == (4, 2)
    replicas.on_engine_sample("a", EngineSample(prompt_tokens_total=20.0), now=2.0)
    assert (parts.index.resident_blocks(slot), parts.feeds.blocks(slot)) == (0, 0)
    assert list(parts.fleet.events) == [ReplicaRestarted("a", "region-of-a")]
    assert not parts.drained_s, "a scrape gives no replica capacity"


def test_a_failed_scrape_leaves_the_last_values(parts: Parts) -> None:
    replicas, slot = replicas_of(parts), parts.fleet.member("a").slot
    replicas.on_engine_sample("a", EngineSample(running_requests=3), now=1.0)
    replicas.on_engine_sample("a", None, now=2.0)
    assert parts.fleet.columns.running_requests[slot] == 3


def test_a_connection_is_in_the_columns_until_there_is_none(parts: Parts) -> None:
    replicas, slot = replicas_of(parts), parts.fleet.member("a").slot
    replicas.on_connection("a", OpenConnection(TcpWindows(), 0.0), now=1.0)
    assert parts.fleet.columns.cwnd_bytes[slot] > 0.0
    replicas.on_connection("a", None, now=2.0)
    assert parts.fleet.columns.cwnd_bytes[slot] == 0.0


def test_models_that_an_engine_lists_may_free_a_queued_request(parts: Parts) -> None:
    replicas = replicas_of(parts)
    replicas.on_models("a", ("m",), now=1.0)
    assert parts.fleet.eligibility.lists("m")
    assert (parts.admission.needs_drain, parts.drained_s) == (True, [1.0])


def test_a_drained_replica_gets_no_new_request(parts: Parts) -> None:
    replicas = replicas_of(parts)
    replicas.drain("a", now=0.0)
    assert parts.dispatch(a_request("first"), now=0.0).replica == "b"
    replicas.drain("a", False, now=0.0)
    assert parts.dispatch(a_request("second"), now=0.0).replica == "a"
    with pytest.raises(UnknownReplica, match="'z'"):
        replicas.drain("z", now=0.0)


def test_a_replaced_fleet_forgets_who_left_and_starts_who_joined_slowly(parts: Parts) -> None:
    replicas = replicas_of(parts)
    parts.index.confirm(PROMPT, parts.fleet.member("a").slot)
    replicas.set_fleet(specs("b", "c"), now=1.0)
    slow_start = parts.request_filter.slow_start
    allowed = {name: slow_start.allowed(member, now=1.0) for name, member in parts.fleet.replicas.items()}
    assert allowed == {"b": float("inf"), "c": 2.0}
    assert parts.index.stored_blocks == 0
    with pytest.raises(ConfigError, match="same name"):
        replicas.set_fleet(specs("b", "b"), now=2.0)


def test_the_first_fleet_of_all_starts_at_full_speed() -> None:
    parts = make_parts(slow_start_s=7.0)
    replicas_of(parts).set_fleet(specs("a"), now=1.0)
    assert parts.request_filter.slow_start.allowed(parts.fleet.member("a"), now=1.0) == float("inf")
