"""The table of metrics is what is exposed, and the figures add up."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gorgo.core.buffer_budget import BufferBudget
from gorgo.core.latency.ttft import PARTS, TtftParts
from gorgo.core.messages.request import AttemptResult, Outcome
from gorgo.core.metric_spec import label_of
from gorgo.live.telemetry.metric_table import LABELS
from gorgo.live.telemetry.metrics import METRICS, Metrics
from tests.core.routers import make_router, timed
from tests.proxy.conftest import Running, Start
from tests.proxy.fakes import DONE, USAGE, answer, chat, delta, stream

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
    own = {name for name in families if name.startswith("gorgo_") and not name.startswith("gorgo_process_")}
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
