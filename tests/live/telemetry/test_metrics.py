"""The table of metrics is what is exposed, and the figures add up: usage by client, store, peers, health."""

from __future__ import annotations

import logging
import re
import ssl
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.parser import text_string_to_metric_families

from gorgo.core.latency.ttft import PARTS, TtftParts
from gorgo.core.limits import BufferBudget, RouterLimits
from gorgo.core.messages.actions import HealthChanged, RegionChanged, ReplicaRestarted
from gorgo.core.messages.decision import CacheSourceStats, KvEventStats
from gorgo.core.messages.request import AttemptResult, Outcome
from gorgo.core.metric_spec import label_of
from gorgo.core.prefix.index import Origin
from gorgo.formatting import cache_line, reports_cache
from gorgo.live.cache_push import PushStats
from gorgo.live.http.tls import ServedTls
from gorgo.live.kv_feed_stats import FeedState, KvFeedStats
from gorgo.live.state import CacheState
from gorgo.live.telemetry.counters import (
    MAX_CLIENTS,
    MAX_MODELS,
    ClientRow,
    ClientUsage,
    MetricStore,
    PeerCounts,
    PeerMeasures,
    PeerMetrics,
)
from gorgo.live.telemetry.health import HealthLog
from gorgo.live.telemetry.metric_table import CACHE_METRICS, CACHE_REPORTS, LABELS, METRICS, buckets_of
from gorgo.live.telemetry.metrics import MIN_WINDOW_S, CacheMetrics, Metrics, Saturation
from gorgo.policies.multi_depth import MultiDepth
from tests.core.routers import make_router, timed
from tests.live.cache_push.test_pushes import TOKENS, Engine
from tests.observability.test_dashboard import labels_after
from tests.proxy.conftest import Running, Start, config_for, until, with_replica
from tests.proxy.fakes import DONE, USAGE, answer, chat, delta, event, stream

# --- The table of metrics is what is exposed, and the figures add up.


CHAT = "/v1/chat/completions"

Series = dict[tuple[tuple[str, str], ...], float]


def moved(series: Series) -> Series:
    """Without what is there from the start and has not moved."""
    return {labels: value for labels, value in series.items() if value}


async def scraped(fleet: Running) -> dict[str, Series]:
    text = (await fleet.client.get("/metrics")).text
    samples: dict[str, Series] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            samples.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
    return samples


async def test_table_names_every_metric_with_its_type_and_labels(start: Start) -> None:
    fleet = await start.fleet([answer(500)], [stream(delta("a"), USAGE, DONE)], [answer(503)])
    for _ in range(4):
        await fleet.client.post(CHAT, content=chat(stream=True))
    text = (await fleet.client.get("/metrics")).text
    families = {family.name: family for family in text_string_to_metric_families(text)}
    own = {name for name in families if re.match("gorgo_(?!process_)|gen_ai_", name)}
    assert own == {spec.name.removesuffix("_total") for spec in METRICS}
    for spec in METRICS:
        family = families[spec.name.removesuffix("_total")]
        assert family.type == spec.kind
        assert family.documentation == spec.description
        for sample in family.samples:
            assert set(sample.labels) - {"le"} == set(spec.labels)
            for label in spec.labels:
                values = label_of(spec.name, label, LABELS).values
                assert not values or sample.labels[label] in values


async def test_figures_of_one_retried_request_add_up(start: Start) -> None:
    fleet = await start.fleet([answer(500)], [stream(delta("a"), USAGE, DONE)])
    assert (await fleet.client.post(CHAT, content=chat(stream=True))).status_code == 200
    await fleet.idle()
    samples = await scraped(fleet)
    r0, r1 = (("region", "here"), ("replica", "r0")), (("region", "here"), ("replica", "r1"))
    assert samples["gorgo_requests_total"] == {
        (("policy", "round-robin"), ("route", CHAT), ("status", "2xx")): 1.0,
    }
    assert samples["gorgo_attempts_total"] == {
        (*r0, ("result", "failed_before_content")): 1.0,
        (*r1, ("result", "completed")): 1.0,
    }
    assert moved(samples["gorgo_retries_total"]) == {(("reason", "failed_before_content"),): 1.0}
    assert samples["gorgo_ttft_seconds_count"] == {r1: 1.0}
    assert samples["gorgo_e2e_seconds_count"] == {r1: 1.0}
    assert samples["gorgo_reported_cached_tokens_total"] == {r1: 8.0}
    assert samples["gorgo_output_tokens_total"] == {r1: 2.0}
    assert samples["gorgo_prompt_tokens_total"] == {r0: 2.0, r1: 2.0}
    assert samples["gorgo_in_flight_requests"] == {r0: 0.0, r1: 0.0}
    assert samples["gorgo_decision_seconds_count"] == {(): 1.0}
    assert samples["gorgo_process_cpu_seconds_total"]


async def test_reject_is_counted_by_its_reason(start: Start) -> None:
    fleet = await start.fleet([answer(200)])
    await fleet.client.post(CHAT, content=b"[]")
    samples = await scraped(fleet)
    assert moved(samples["gorgo_rejects_total"]) == {(("reason", "invalid_json"),): 1.0}


async def test_answer_that_is_not_a_stream_has_no_ttft(start: Start) -> None:
    fleet = await start.fleet([answer(200, b'{"usage":{"prompt_tokens":2,"completion_tokens":1}}')])
    await fleet.client.post(CHAT, content=chat())
    await fleet.idle()
    samples = await scraped(fleet)
    assert "gorgo_ttft_seconds_count" not in samples
    assert list(samples["gorgo_e2e_seconds_count"].values()) == [1.0]
    assert next(iter(fleet.state.routing.router.samples)).ttft_ms is None


async def test_error_of_predictions_is_told_with_its_direction(start: Start) -> None:
    fleet = await start.fleet([stream(delta("a"), USAGE, DONE)])
    metrics = fleet.state.telemetry.metrics
    parts = TtftParts(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
    metrics.first_content("r0", "here", 1.0, predicted_s=1.5, parts=parts)
    metrics.first_content("r0", "here", 2.0, predicted_s=0.75, parts=parts)
    metrics.first_content("r0", "here", 2.0, predicted_s=None, parts=parts)
    samples = await scraped(fleet)
    r0 = (("region", "here"), ("replica", "r0"))
    assert samples["gorgo_prediction_error_seconds_count"] == {r0: 2.0}
    assert samples["gorgo_prediction_error_seconds_sum"] == {r0: 1.75}
    assert samples["gorgo_prediction_signed_error_seconds_total"] == {
        (("direction", "over"), *r0): 0.5,
        (("direction", "under"), *r0): 1.25,
    }


async def test_parts_of_ttfts_add_up_to_what_was_measured(start: Start) -> None:
    fleet = await start.fleet([stream(delta("a"), USAGE, DONE)], [stream(delta("a"), USAGE, DONE)])
    for _ in range(4):
        await fleet.client.post(CHAT, content=chat(stream=True))
    await fleet.idle()
    samples = await scraped(fleet)
    for replica in ("r0", "r1"):
        series = samples["gorgo_ttft_component_seconds_total"]
        spent = {dict(labels)["part"]: value for labels, value in series.items() if dict(labels)["replica"] == replica}
        assert list(spent) == list(PARTS)
        ttft_s = samples["gorgo_ttft_seconds_sum"][("region", "here"), ("replica", replica)]
        assert sum(spent.values()) == pytest.approx(ttft_s)
    counts = {dict(labels)["part"]: value for labels, value in samples["gorgo_ttft_part_seconds_count"].items()}
    assert counts == dict.fromkeys(PARTS, 4.0)
    for sample in fleet.state.routing.router.samples:
        assert sample.ttft_parts_ms is not None
        assert sum(sample.ttft_parts_ms.values()) == pytest.approx(sample.ttft_ms)


async def test_belief_is_held_against_what_engines_report_of_the_same_answers(start: Start) -> None:
    fleet = await start.fleet([answer(200)])
    metrics = fleet.state.telemetry.metrics
    for cached, believed in ((8, 64), (100, 40), (None, 999)):
        outcome = Outcome(AttemptResult.COMPLETED, 200, prompt_tokens=128, cached_tokens=cached)
        metrics.completed("r0", "here", 1.0, outcome, estimated_cached_tokens=believed)
    samples = await scraped(fleet)
    r0 = (("region", "here"), ("replica", "r0"))
    assert samples["gorgo_reported_cached_tokens_total"] == {r0: 108.0}
    assert samples["gorgo_reported_prompt_tokens_total"] == {r0: 256.0}
    assert samples["gorgo_cached_tokens_signed_error_total"] == {
        (("direction", "over"), *r0): 56.0,
        (("direction", "under"), *r0): 60.0,
    }


async def test_series_of_a_replica_and_of_a_region_go_with_the_last_who_had_them(start: Start) -> None:
    fleet = await start.fleet([answer(200)])
    metrics: Metrics = fleet.state.telemetry.metrics
    parts = TtftParts(0.5, 0.0, 0.0, 0.0, 0.0, 0.5)
    for replica, region in (("r0", "here"), ("gone", "there")):
        metrics.first_content(replica, region, 1.0, predicted_s=None, parts=parts)
    metrics.retain_replicas({("r0", "here")})
    metrics.first_content("r0", "here", 1.0, predicted_s=None, parts=parts)
    samples = await scraped(fleet)
    shown = {value for series in samples.values() for labels in series for value in dict(labels).values()}
    assert not {"gone", "there"} & shown
    spent = samples["gorgo_ttft_component_seconds_total"]
    assert spent[("part", "router"), ("region", "here"), ("replica", "r0")] == 1.0


async def test_times_are_shown_by_opentelemetry_s_conventions_too(start: Start) -> None:
    usage = event({"choices": [], "usage": {"prompt_tokens": 12, "completion_tokens": 3}})
    fleet = await start.fleet([stream(delta("a"), delta("b"), delta("c"), usage, DONE), answer(400)])
    for _ in range(2):
        await fleet.client.post(CHAT, content=chat(stream=True))
    await fleet.client.post("/tokenize", content=chat())
    samples = await scraped(fleet)
    base = {"gen_ai_operation_name": "chat", "gen_ai_provider_name": "gorgo", "gen_ai_request_model": "other"}

    def count(name: str, **labels: str) -> float:
        return samples[f"gen_ai_server_{name}_seconds_count"].get(tuple(sorted((base | labels).items())), 0.0)

    assert count("request_duration", error_type="") == 1
    assert count("request_duration", error_type="400") == 1
    assert count("time_to_first_token") == count("time_per_output_token") == 1
    assert sum(samples["gen_ai_server_request_duration_seconds_count"].values()) == 2, "tokenizing is no operation"


async def test_readiness_is_what_the_route_says_and_certificates_are_those_of_listeners(start: Start) -> None:
    fleet = await start.fleet([answer(200)])
    ready, expiry = "gorgo_ready", "gorgo_certificate_expiry_timestamp_seconds"
    registry = fleet.state.telemetry.metrics.registry
    assert (await fleet.client.get("/ready")).status_code == 200
    assert registry.get_sample_value(ready) == 1.0
    assert registry.get_sample_value(expiry, {"certificate": "proxy.tls"}) is None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    fleet.state.telemetry.metrics.listeners.tls.append(ServedTls(context, expires_s=1.8e9))
    assert registry.get_sample_value(expiry, {"certificate": "proxy.tls"}) == 1.8e9
    fleet.state.stopping = True
    assert (await fleet.client.get("/ready")).status_code == 503
    assert registry.get_sample_value(ready) == 0.0
    fleet.state.stopping = False


def test_each_region_says_whether_it_is_cut_off() -> None:
    router = make_router(replicas=[timed("a", "here"), timed("b", "there"), timed("c", "there")])
    metrics = Metrics(router, lambda: 40.0, BufferBudget(1))

    def cut_off() -> dict[str, float]:
        families = text_string_to_metric_families(metrics.exposition().decode())
        (family,) = [family for family in families if family.name == "gorgo_region_unreachable"]
        assert all(set(sample.labels) == {"region"} for sample in family.samples)
        return {sample.labels["region"]: sample.value for sample in family.samples}

    assert cut_off() == {"here": 0.0, "there": 0.0}
    for name in ("b", "c"):
        router.replicas.on_probe(name, None, now=40.0)
    assert router.view.unreachable_regions == {"there"}
    assert cut_off() == {"here": 0.0, "there": 1.0}


def test_routes_of_a_policy_are_shown_with_age_and_evictions() -> None:
    router = make_router("a", policy="multi-depth", limits=RouterLimits(max_routes=2))
    policy = router.settings.policy
    assert isinstance(policy, MultiDepth)
    for number in range(5):
        policy.routes.set_route((None, bytes([number])), "a", Origin.LOCAL, now=float(number))
    exposition = Metrics(router, lambda: 13.0, BufferBudget(1)).exposition().decode().splitlines()
    assert {
        'gorgo_routes{origin="local"} 2.0',
        'gorgo_routes{origin="remote"} 0.0',
        'gorgo_route_unused_seconds{origin="local"} 10.0',
        'gorgo_route_evictions_total{origin="local"} 3.0',
    } <= set(exposition)
    plain = Metrics(make_router("a"), lambda: 13.0, BufferBudget(1)).exposition().decode().splitlines()
    assert not [line for line in plain if line.startswith("gorgo_route")]


def state(
    feed: KvFeedStats | None = None, pushes: PushStats | None = None, unused: str | None = None, **changes: Any
) -> CacheState:
    fields: dict[str, Any] = {
        "source": "push",
        "complete": True,
        "block_tokens": 16,
        "blocks": 70,
        "speculated_blocks": 0,
        "age_s": 1.5,
        "requests": 2,
        "estimated_tokens": 90,
        "reported_tokens": 100,
        "phantom_tokens": 4,
        "missed_tokens": 14,
        "events": KvEventStats(),
        "decisions": {"history": 0, "events": 0, "push": 0},
    }
    return CacheState("here", CacheSourceStats(**{**fields, **changes}), pushes or PushStats(), feed, unused)


def samples(found: CacheState) -> dict[tuple[str, ...], float]:
    metrics = CacheMetrics()
    metrics.read = lambda: {"r0": found}
    return {
        (
            sample.name,
            *(value for name, value in sample.labels.items() if name not in ("replica", "region")),
        ): sample.value
        for family in metrics.collect()
        for sample in family.samples
    }


def test_metrics_have_the_age_of_a_source_and_its_errors() -> None:
    found = samples(state())
    assert found["gorgo_cache_reported_blocks",] == 70
    assert found["gorgo_cache_report_age_seconds",] == 1.5
    assert (found["gorgo_cache_phantom_tokens_total",], found["gorgo_cache_missed_tokens_total",]) == (4, 14)
    assert {name for name, *_ in found} == CACHE_METRICS


def test_age_of_a_source_without_reports_is_absent() -> None:
    assert ("gorgo_cache_report_age_seconds",) not in samples(state(source="history", age_s=None))


def test_every_count_of_feeds_and_pushes_has_its_result() -> None:
    feed = KvFeedStats(
        messages=1, rejected_messages=2, rejected_events=3, gaps=4, restarts=5, replays=6, failed_replays=7
    )
    pushes = PushStats(snapshots=8, evictions=9, stale=10, lost=11, limited=12, silences=13)
    found = samples(state(feed, pushes))
    reports = {result: found["gorgo_cache_reports_total", result] for result in CACHE_REPORTS}
    assert list(reports.values()) == [1, 5, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13]


@pytest.mark.parametrize(
    ("found", "shown"),
    [
        (state(source="history", age_s=None), False),
        (state(), True),
        (state(source="events"), True),
        (state(KvFeedStats(state=FeedState.SILENT), source="history"), True),
        (state(pushes=PushStats(silences=1), source="history"), True),
    ],
)
def test_terminal_shows_caches_with_reports_or_with_lost_ones(found: CacheState, shown: bool) -> None:
    assert reports_cache(found.as_dict()) is shown


def test_line_names_the_state_and_faults_of_a_feed() -> None:
    feed = KvFeedStats(state=FeedState.GAP, gaps=2, replays=3, failed_replays=1)
    line = cache_line(state(feed, source="events", complete=False, requests=0).as_dict())
    assert line == "events, incomplete, 70 blocks, newest 2 s ago, feed gap, gaps 2, replays 3, failed replays 1"


def test_line_says_why_reports_are_not_used_and_how_many_decisions_used_the_history() -> None:
    unused = state(unused="no tokenizer for m", source="events", requests=0).as_dict()
    assert cache_line(unused) == "history: no tokenizer for m, events unused, 70 blocks, newest 2 s ago"
    some = state(source="events", requests=0, decisions={"history": 3, "events": 17, "push": 0}).as_dict()
    assert cache_line(some) == "events, 70 blocks, newest 2 s ago, 3 of 20 decisions by history"


async def test_pushes_are_seen_in_metrics_fleet_status_and_page(start: Start) -> None:
    replicas = [await start.replica(stream(delta("a"), DONE))]
    config = with_replica(config_for(replicas), 0, push_token_env="PUSH_0")
    proxy = await start.proxy(config, replicas, environ=TOKENS)
    engine = Engine(proxy)
    await engine.sync([1, 2, 3])
    engine.sequence += 2
    await engine.evict([1])
    metrics = (await proxy.admin.get("/metrics")).text
    assert 'gorgo_cache_reported_blocks{region="here",replica="r0"} 2.0' in metrics
    assert 'gorgo_cache_reports_total{region="here",replica="r0",result="lost"} 2.0' in metrics
    (row,) = (await proxy.admin.get("/admin/fleet")).json()["replicas"]
    assert (row["cache"]["source"], row["cache"]["blocks"], row["cache"]["pushes"]["lost"]) == ("push", 2, 2)
    (shown,) = (await proxy.admin.get("/admin/status")).json()["replicas"]
    assert (shown["cache"]["source"], shown["cache"]["unused"]) == (
        "push",
        "policy round-robin reads no reports of caches",
    )


@dataclass
class Limits:
    max_in_flight: int = 200


@dataclass
class Settings:
    limits: Limits = field(default_factory=Limits)


@dataclass
class Load:
    in_flight: int = 0
    settings: Settings = field(default_factory=Settings)


def saturation(load: Load, times: list[float]) -> Saturation:
    """One whose clocks are the two numbers of `times`."""
    return Saturation(cast(Any, load), BufferBudget(1000), wall=lambda: times[0], processor=lambda: times[1])


def test_requests_are_a_share_of_the_limit() -> None:
    load = Load()
    found = saturation(load, [0.0, 0.0])
    assert dict(found.shares())["requests"] == 0.0
    load.in_flight = 50
    assert dict(found.shares())["requests"] == 0.25
    load.in_flight = 500
    assert dict(found.shares())["requests"] == 1.0


def test_processor_is_the_share_of_the_last_window() -> None:
    times = [0.0, 0.0]
    found = saturation(Load(), times)
    assert dict(found.shares())["processor"] == 0.0
    times[:] = [2 * MIN_WINDOW_S, 1.5 * MIN_WINDOW_S]
    assert dict(found.shares())["processor"] == 0.75
    times[:] = [2 * MIN_WINDOW_S + 0.1, 1.5 * MIN_WINDOW_S]
    assert dict(found.shares())["processor"] == 0.75, "a second server scrapes a moment later"
    times[:] = [4 * MIN_WINDOW_S, 1.5 * MIN_WINDOW_S]
    assert dict(found.shares())["processor"] == 0.0


def test_threads_do_not_make_more_than_all_of_it() -> None:
    times = [0.0, 0.0]
    found = saturation(Load(), times)
    times[:] = [10.0, 30.0]
    assert dict(found.shares())["processor"] == 1.0


# --- The proxy's labels and buckets as the table has them.


def test_labels_are_the_documented_ones() -> None:
    documented = list(labels_after("Labels of the proxy:"))
    assert documented == [(spec.label, spec.of, spec.meaning, spec.values, spec.at_most) for spec in LABELS]


#: Seconds.
LONG = (0.01, 0.025, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1, 1.5, 2, 3, 5, 7.5, 10, 20, 30, 60, 120, 300)
SHORT = {
    "gorgo_decision_seconds": (25e-6, 50e-6, 100e-6, 250e-6, 500e-6, 1e-3, 2.5e-3, 5e-3, 10e-3, 50e-3),
    "gorgo_prediction_error_seconds": (
        *(0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1, 1.5, 2, 3, 5, 10, 30),
    ),
    "gorgo_ttft_part_seconds": (0.005, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 30),
    "gorgo_model_error_ratio": (0.01, 0.02, 0.05, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 2, 5, 10),
    # As OpenTelemetry's conventions for generative AI advise.
    "gen_ai_server_request_duration_seconds": (
        *(0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64),
        *(1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92),
    ),
    "gen_ai_server_time_to_first_token_seconds": (
        *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1),
        *(0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10),
    ),
    "gen_ai_server_time_per_output_token_seconds": (
        *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2),
        *(0.3, 0.4, 0.5, 0.75, 1, 2.5),
    ),
    "gorgo_body_read_seconds": (0.001, 0.005, 0.02, 0.05, 0.1, 0.5, 1, 5, 15, 60),
}


def test_every_histogram_has_its_buckets() -> None:
    names = [metric.name for metric in METRICS if metric.kind == "histogram"]
    assert set(SHORT) < set(names)
    assert {name: buckets_of(name) for name in names} == dict.fromkeys(names, LONG) | SHORT


# --- Usage by client and model: bounded labels, and a window of a minute.


class Rig:
    """A store, a clock and the models that replicas list."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.models = {"m"}
        self.store = MetricStore(METRICS)
        self.usage = ClientUsage(self.store, lambda model: model in self.models, lambda: self.now)

    def labels(self, name: str, label: str) -> set[str]:
        families = {family.name: family for family in self.store.collect()}
        return {sample.labels[label] for sample in families[name.removesuffix("_total")].samples}


def test_tokens_and_rejections_are_of_the_last_minute() -> None:
    rig = Rig()
    rig.usage.finished("a", "m", 200, prompt_tokens=100, output_tokens=20, now=rig.now)
    rig.now += 59.5
    rig.usage.finished("a", "m", 200, prompt_tokens=1, now=rig.now)
    rig.usage.rejected("b", "client_rate")
    rig.usage.finished("b", None, 429, now=rig.now)
    assert rig.usage.last_minute() == [ClientRow("a", 2, 121, 0), ClientRow("b", 1, 0, 1)]
    rig.now += 1.0
    assert rig.usage.last_minute() == [ClientRow("a", 1, 1, 0), ClientRow("b", 1, 0, 1)]
    rig.now += 3600.0
    assert rig.usage.last_minute() == [ClientRow("a", 0, 0, 0), ClientRow("b", 0, 0, 0)]


def test_further_clients_and_models_are_other() -> None:
    rig = Rig()
    rig.models = {f"m{n}" for n in range(MAX_MODELS + 5)}
    for n in range(MAX_CLIENTS + 5):
        rig.usage.finished(f"c{n}", f"m{n}", 200, prompt_tokens=1, now=rig.now)
        rig.usage.rejected(f"c{n}", "client_rate")
    rig.usage.finished(None, "not listed", 404, now=rig.now)
    clients = rig.labels("gorgo_client_requests_total", "client")
    assert (len(clients), {"other", "none"} <= clients) == (MAX_CLIENTS + 2, True)
    assert len(rig.labels("gorgo_client_tokens_total", "model")) == MAX_MODELS + 1
    assert "not listed" not in rig.labels("gorgo_client_requests_total", "model")
    assert len(rig.labels("gorgo_client_rejects_total", "client")) == MAX_CLIENTS + 1
    assert {row.name: row.requests for row in rig.usage.last_minute()}["other"] == 5


def test_models_that_no_replica_lists_any_more_make_room_for_those_that_came() -> None:
    rig = Rig()
    for generation in range(3):
        rig.models = {"m"} | {f"adapter-{generation}-{n}" for n in range(MAX_MODELS - 1)}
        rig.now += 10.0
        for model in sorted(rig.models):
            rig.usage.finished(None, model, 200, prompt_tokens=1, now=rig.now)
        assert rig.labels("gorgo_client_requests_total", "model") == rig.models
    assert rig.store.count("gorgo_client_requests_total", "none", "m", "2xx").value == 3.0, "its count goes on"


def test_room_is_looked_for_once_a_second_while_all_models_are_listed() -> None:
    rig = Rig()
    rig.models = {f"m{n}" for n in range(MAX_MODELS + 1)}
    for model in sorted(rig.models):
        rig.usage.finished(None, model, 200, now=rig.now)
    (waiting,) = rig.models - rig.labels("gorgo_client_requests_total", "model")
    rig.models = {waiting}
    rig.usage.finished(None, waiting, 200, now=rig.now)
    assert waiting not in rig.labels("gorgo_client_requests_total", "model")
    rig.now += 1.0
    rig.usage.finished(None, waiting, 200, now=rig.now)
    assert rig.labels("gorgo_client_requests_total", "model") == {waiting, "other"}


def test_series_of_a_client_or_model_that_left_end_and_make_room() -> None:
    rig = Rig()
    rig.models |= {"n"}
    for client in ("a", "b"):
        for model in ("m", "n"):
            rig.usage.finished(client, model, 200, prompt_tokens=1, now=rig.now)
    rig.models = {"m"}
    rig.usage.retain({"b"})
    assert rig.labels("gorgo_client_tokens_total", "client") == {"b"}
    assert rig.labels("gorgo_client_requests_total", "model") == {"m"}
    assert [row.name for row in rig.usage.last_minute()] == ["b"]
    rig.usage.finished("b", "m", 200, prompt_tokens=2, now=rig.now)
    assert rig.store.count("gorgo_client_tokens_total", "b", "m", "prompt").value == 3.0


# --- Metrics of the store and of peers, read at a scrape.


def exposition(measures: PeerMeasures | None) -> list[str]:
    metrics, registry = PeerMetrics(), CollectorRegistry()
    metrics.read = lambda: measures
    registry.register(metrics)
    return [line for line in generate_latest(registry).decode().splitlines() if not line.startswith("#")]


def test_a_router_without_a_store_shows_none_of_them() -> None:
    assert exposition(None) == []


def test_counts_state_and_differences_are_shown() -> None:
    counts = PeerCounts(written_bytes=7, read_bytes=9, write_s=0.5, dropped=2)
    counts.reports["written"], counts.failures["full"] = 3, 4
    lines = exposition(
        PeerMeasures(counts, joined=False, peers=2, differing={"weights": 1}, evicted={Origin.REMOTE: 5})
    )
    assert {
        "gorgo_peer_store_up 0.0",
        "gorgo_peers 2.0",
        'gorgo_peers_differing{subject="weights"} 1.0',
        'gorgo_peers_differing{subject="policy"} 0.0',
        'gorgo_peer_reports_total{result="written"} 3.0',
        'gorgo_peer_reports_total{result="malformed"} 0.0',
        'gorgo_peer_store_failures_total{reason="full"} 4.0',
        'gorgo_peer_bytes_total{way="written"} 7.0',
        'gorgo_peer_bytes_total{way="read"} 9.0',
        "gorgo_peer_write_seconds_total 0.5",
        "gorgo_peer_dropped_entries_total 2.0",
        'gorgo_peer_evictions_total{origin="remote"} 5.0',
        'gorgo_peer_evictions_total{origin="local"} 0.0',
        'gorgo_peer_evictions_total{origin="push"} 0.0',
    } <= set(lines)


# --- Ejections and readmissions reach the log.


def told(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    return [(record.getMessage(), record.fields["replica"]) for record in caplog.records if "_" in record.getMessage()]  # type: ignore[attr-defined]


def test_each_fleet_event_is_one_line_and_only_a_loss_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "gorgo")
    counted: list[tuple[str, str]] = []
    metrics = SimpleNamespace(replica_restarted=lambda *labels: counted.append(labels))
    health_log = HealthLog(cast(Metrics, metrics))
    for state in ("ejected", "half_open", "healthy"):
        health_log(HealthChanged("a", state))
    health_log(ReplicaRestarted("a", "near"))
    assert told(caplog) == [
        ("replica_ejected", "a"),
        ("replica_on_trial", "a"),
        ("replica_readmitted", "a"),
        ("replica_restarted", "a"),
    ]
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO", "INFO", "WARNING"]
    assert counted == [("a", "near")]


def test_ejection_is_logged_with_its_cause_its_words_and_its_time(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "gorgo")
    HealthLog(cast(Metrics, None))(HealthChanged("a", "ejected", "attempts", "status 500 after 0.1 s: no memory", 5.0))
    (record,) = caplog.records
    fields = {"replica": "a", "by": "attempts", "why": "status 500 after 0.1 s: no memory", "for_s": 5.0}
    assert getattr(record, "fields", None) == fields


def test_region_that_is_lost_and_back_is_logged_with_its_name(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "gorgo")
    health_log = HealthLog(cast(Metrics, SimpleNamespace()))
    for reachable in (False, True):
        health_log(RegionChanged("far", reachable=reachable))
    names = [(record.getMessage(), record.fields["region"]) for record in caplog.records]  # type: ignore[attr-defined]
    assert names == [("region_unreachable", "far"), ("region_reachable", "far")]
    assert [record.levelname for record in caplog.records] == ["WARNING", "INFO"]


async def test_an_ejection_is_in_the_log_of_a_running_proxy(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    good = [stream(delta("good"), DONE)]
    fleet = await start.fleet([answer(500)], good, good)
    for _ in range(9):
        response = await fleet.client.post("/v1/chat/completions", content=chat(stream=True))
        assert response.status_code == 200
    await until(lambda: ("replica_ejected", "r0") in told(caplog))
