"""Traces, of the proxy and behind Envoy: what a collector gets, what a replica is sent, and what neither is ever
told.
"""

from __future__ import annotations

import asyncio
import logging
import sys
import threading
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from gorgo.config.model import OverloadConfig, ProxyConfig, TracingConfig
from gorgo.core.latency.ttft import PARTS
from gorgo.errors import MissingExtra
from gorgo.live.build import build_live, make_tracing
from gorgo.live.telemetry import spans as span_export
from gorgo.live.telemetry.spans import CLIENT_TRACES_PER_S, SpanExport
from gorgo.picker.server import take_access_log
from gorgo.picker.state import PICKER, PickerState
from gorgo.policies.registry import make_policy
from tests.observability.collector import Collector, Received, collecting
from tests.picker.virtual import (
    BODY,
    EVENTS,
    Picked,
    VirtualPicker,
    begin,
    body_message,
    config_of,
    headers_message,
    log_message,
)
from tests.proxy.conftest import QUIET, Running, Start, config_for, system_tls, with_replica
from tests.proxy.fakes import DONE, USAGE, answer, chat, delta, stream

# --- Traces: what a collector gets, what a replica is sent, and what neither is ever told.


CHAT = "/v1/chat/completions"
TRACE_ID, PARENT_ID = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
SAMPLED, NOT_SAMPLED = f"00-{TRACE_ID}-{PARENT_ID}-01", f"00-{TRACE_ID}-{PARENT_ID}-00"
GOOD = stream(delta("a"), USAGE, DONE)


@pytest.fixture
async def collector() -> AsyncIterator[Collector]:
    async with collecting() as running:
        yield running


def traced(collector: Collector, ratio: float = 1.0, policy: str = "round-robin") -> ProxyConfig:
    return replace(QUIET, policy=policy, tracing=TracingConfig(endpoint=collector.endpoint, sample_ratio=ratio))


async def ask(fleet: Running, **headers: str) -> None:
    response = await fleet.client.post(CHAT, content=chat(stream=True), headers=headers)
    assert response.status_code == 200, response.text


async def sent(fleet: Running, collector: Collector) -> dict[str, list[Received]]:
    """Spans by name, when the proxy has stopped and sent everything."""
    await fleet.stop()
    found: dict[str, list[Received]] = {}
    for span in collector.spans:
        found.setdefault(span.name, []).append(span)
    return found


def header(fleet: Running, name: str, replica: int = 0) -> list[str]:
    return fleet.replicas[replica].seen[-1].header(name)


async def test_a_request_is_a_span_with_its_decision_attempt_and_first_content(
    start: Start, collector: Collector
) -> None:
    fleet = await start.fleet([GOOD], proxy=traced(collector, policy="gorgo-ms"))
    await ask(fleet, **{"x-request-id": "r:1"})
    spans = await sent(fleet, collector)
    assert {name: len(found) for name, found in spans.items()} == dict.fromkeys(
        ("POST /v1/chat/completions", "decision", "attempt", "first content"), 1
    )
    (root,), (decision,) = spans["POST /v1/chat/completions"], spans["decision"]
    (attempt,), (first,) = spans["attempt"], spans["first content"]
    assert {span.trace_id for found in spans.values() for span in found} == {root.trace_id}
    assert (root.parent_id, decision.parent_id, attempt.parent_id) == ("", root.span_id, root.span_id)
    assert first.parent_id == attempt.span_id
    assert root.start_ns <= decision.start_ns <= decision.end_ns == attempt.start_ns == first.start_ns
    assert first.start_ns < first.end_ns <= attempt.end_ns <= root.end_ns
    assert collector.resources[0]["service.name"] == "gorgo"
    assert collector.resources[0]["cloud.region"] == "here"


async def test_spans_say_what_was_decided_and_what_came_of_it(start: Start, collector: Collector) -> None:
    fleet = await start.fleet([GOOD], proxy=traced(collector, policy="gorgo-ms"))
    await ask(fleet, **{"x-request-id": "r:1"})
    await fleet.idle()
    (sample,) = fleet.state.routing.router.samples
    spans = await sent(fleet, collector)
    decision, attempt = spans["decision"][0].attributes, spans["attempt"][0].attributes
    assert (decision["gorgo.policy"], decision["gorgo.replica"], decision["gorgo.candidates"]) == ("gorgo-ms", "r0", 1)
    assert {name.removeprefix("gorgo.term.") for name in decision if ".term." in name} == set(sample.terms)
    assert decision["gorgo.predicted_ttft_ms"] == pytest.approx(sample.predicted_ttft_ms)
    assert (attempt["gorgo.result"], attempt["http.response.status_code"]) == ("completed", 200)
    assert (attempt["gen_ai.usage.input_tokens"], attempt["gorgo.cached_tokens"]) == (12, 8)
    server = (attempt["server.address"], attempt["server.port"])
    assert server == ("127.0.0.1", fleet.replicas[0].port)
    assert attempt["gen_ai.operation.name"] == "chat"
    first = spans["first content"][0].attributes
    assert [first[f"gorgo.ttft_{part}_ms"] for part in PARTS] == pytest.approx(
        list((sample.ttft_parts_ms or {}).values())
    )
    root = spans["POST /v1/chat/completions"][0].attributes
    assert root["gorgo.request_id"] == "r:1"
    assert (root["gen_ai.operation.name"], root["gen_ai.provider.name"]) == ("chat", "gorgo")
    assert root["gorgo.ttft_ms"] == pytest.approx(sample.ttft_ms)


async def test_a_trace_of_the_client_goes_on_to_the_replica_under_the_attempt_s_span(
    start: Start, collector: Collector
) -> None:
    fleet = await start.fleet([GOOD], proxy=traced(collector, ratio=0.0))
    await ask(fleet, traceparent=SAMPLED, tracestate="vendor=1")
    (given,), state = header(fleet, "traceparent"), header(fleet, "tracestate")
    spans = await sent(fleet, collector)
    (root,), (attempt,) = spans["POST /v1/chat/completions"], spans["attempt"]
    assert (root.trace_id, root.parent_id) == (TRACE_ID, PARENT_ID)
    assert (given, state) == (f"00-{TRACE_ID}-{attempt.span_id}-01", ["vendor=1"])


async def test_each_attempt_is_a_span_of_its_own_and_a_failure_shows(start: Start, collector: Collector) -> None:
    fleet = await start.fleet([answer(500)], [GOOD], proxy=traced(collector))
    await ask(fleet)
    given = [fleet.replicas[n].seen[-1].header("traceparent")[0].split("-")[2] for n in (0, 1)]
    spans = await sent(fleet, collector)
    attempts = sorted(spans["attempt"], key=lambda span: span.start_ns)
    assert [span.span_id for span in attempts] == given
    assert [span.failed for span in attempts] == [True, False]
    assert [span.attributes["gorgo.attempt"] for span in attempts] == [1, 2]
    assert attempts[0].attributes["gorgo.result"] == "failed_before_content"
    assert len(spans["decision"]) == 2
    assert spans["POST /v1/chat/completions"][0].attributes["gorgo.retries"] == 1


async def test_the_rest_of_a_stream_that_broke_off_is_sent_under_the_span_of_its_own_attempt(
    start: Start, collector: Collector
) -> None:
    fleet = await start.fleet([stream(delta("a"))], [GOOD], proxy=traced(collector))
    await ask(fleet)
    given = [fleet.replicas[n].seen[-1].header("traceparent")[0].split("-")[2] for n in (0, 1)]
    spans = await sent(fleet, collector)
    assert sorted(given) == sorted(span.span_id for span in spans["attempt"])


async def test_a_request_that_is_refused_is_a_span_with_its_code(start: Start, collector: Collector) -> None:
    fleet = await start.fleet([GOOD], proxy=traced(collector))
    assert (await fleet.client.post(CHAT, content=b"[]")).status_code == 400
    (root,) = (await sent(fleet, collector))["POST /v1/chat/completions"]
    assert (root.attributes["http.response.status_code"], root.attributes["error.type"]) == (400, "invalid_json")
    assert not root.failed, "the client's own mistake"


async def test_clients_start_a_bounded_number_of_traces_a_second(start: Start, collector: Collector) -> None:
    fleet = await start.fleet([GOOD], proxy=traced(collector, ratio=0.0))
    tracing = fleet.state.telemetry.tracing
    assert tracing is not None

    def started(at_s: float, value: str = SAMPLED) -> int:
        headers = [(b"traceparent", value.encode())]
        many = range(3 * CLIENT_TRACES_PER_S)
        traces = [tracing.start(headers, route=CHAT, request_id="r", received_s=at_s) for _ in many]
        return sum(trace is not None for trace in traces)

    assert started(5.0, NOT_SAMPLED) == 0
    assert [started(at_s) for at_s in (5.0, 5.9, 6.0, 1.0)] == [
        CLIENT_TRACES_PER_S,
        0,
        CLIENT_TRACES_PER_S,
        CLIENT_TRACES_PER_S,
    ]
    await fleet.stop()


@pytest.mark.parametrize("ratio", [0.0, 1.0])
async def test_a_client_s_no_is_a_no(start: Start, collector: Collector, ratio: float) -> None:
    fleet = await start.fleet([GOOD], proxy=traced(collector, ratio=ratio))
    await ask(fleet, traceparent=NOT_SAMPLED)
    assert header(fleet, "traceparent") == [NOT_SAMPLED]
    assert await sent(fleet, collector) == {}


async def test_who_is_not_traced_is_sent_on_as_it_came(start: Start, collector: Collector) -> None:
    fleet = await start.fleet([GOOD], proxy=traced(collector, ratio=0.0))
    await ask(fleet, tracestate="vendor=1")
    assert (header(fleet, "traceparent"), header(fleet, "tracestate")) == ([], ["vendor=1"])
    assert await sent(fleet, collector) == {}


@pytest.mark.parametrize("given", ["00-zz-00-01", "ff-" + SAMPLED[3:], "00-" + "0" * 32 + f"-{PARENT_ID}-01", ""])
async def test_nonsense_from_a_client_begins_a_new_trace(start: Start, collector: Collector, given: str) -> None:
    fleet = await start.fleet([GOOD], proxy=traced(collector))
    await ask(fleet, traceparent=given, tracestate="vendor=1")
    (root,) = (await sent(fleet, collector))["POST /v1/chat/completions"]
    assert root.parent_id == ""
    assert header(fleet, "traceparent")[0].split("-")[1] == root.trace_id
    assert header(fleet, "tracestate") == [], "of a trace that there is not"


async def test_without_tracing_the_headers_pass_as_they_are(start: Start) -> None:
    fleet = await start.fleet([GOOD])
    assert fleet.state.telemetry.tracing is None
    await ask(fleet, traceparent="whatever the client sends", tracestate="vendor=1")
    assert header(fleet, "traceparent") == ["whatever the client sends"]
    assert header(fleet, "tracestate") == ["vendor=1"]


async def test_a_model_that_a_replica_lists_is_named_with_its_engine(start: Start, collector: Collector) -> None:
    replica = await start.replica(GOOD)
    config = config_for([replica], proxy=traced(collector))
    config = with_replica(config, 0, models=("qwen",), engine="vllm")
    fleet = await start.proxy(config, [replica])
    await fleet.client.post(CHAT, content=chat(stream=True, model="qwen"))
    spans = await sent(fleet, collector)
    for name in ("POST /v1/chat/completions", "attempt"):
        assert spans[name][0].attributes["gen_ai.request.model"] == "qwen"
    assert spans["attempt"][0].attributes["gen_ai.provider.name"] == "vllm"


async def test_no_prompt_model_or_key_is_in_a_span(start: Start, collector: Collector) -> None:
    fleet = await start.fleet([GOOD], [answer(500, b"the-engine-said")], proxy=traced(collector))
    secrets = {
        "prompt": "my-own-words",
        "model": "my-own-model",
        "authorization": "my-own-key",
        "cookie": "my-own-cookie",
    }
    body = chat(stream=True, model=secrets["model"], messages=[{"role": "user", "content": secrets["prompt"]}])
    for _ in range(2):
        headers = {"authorization": f"Bearer {secrets['authorization']}", "cookie": secrets["cookie"]}
        await fleet.client.post(CHAT, content=body, headers=headers)
    await sent(fleet, collector)
    assert len(collector.spans) >= 8
    told = b"".join(collector.bodies)
    assert [word for word in (*secrets.values(), "the-engine-said") if word.encode() in told] == []


async def spans_counted(fleet: Running) -> dict[str, float]:
    text = (await fleet.client.get("/metrics")).text
    rows = [line for line in text.splitlines() if line.startswith("gorgo_trace_spans_total{")]
    return {row.split('"')[1]: float(row.split()[-1]) for row in rows}


async def test_a_collector_in_trouble_costs_spans_and_no_request(
    start: Start, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "gorgo")
    monkeypatch.setattr(span_export, "FLUSH_S", 0.01)
    async with collecting(400, 200) as collector:
        fleet = await start.fleet([GOOD], proxy=traced(collector))
        await ask(fleet)
        await collector.arrived.wait()
        await ask(fleet)
        async with asyncio.timeout(10):
            while (await spans_counted(fleet))["exported"] == 0:
                await asyncio.sleep(0.01)
        counted = await spans_counted(fleet)
        assert counted["failed"] >= 1
        assert counted["failed"] + counted["exported"] <= 8
        events = [record.getMessage() for record in caplog.records if record.getMessage().startswith("trace_")]
        assert events == ["trace_export_failed", "trace_export_resumed"]


async def test_spans_that_wait_for_a_silent_collector_are_bounded_and_delay_no_request(
    start: Start, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(span_export, "MAX_WAITING", 6)
    monkeypatch.setattr(span_export, "BATCH", 6)
    monkeypatch.setattr(span_export, "EXPORT_S", 60.0)
    collector.open.clear()
    fleet = await start.fleet([GOOD], proxy=traced(collector))
    for _ in range(2):  # four spans each; six go out as a batch
        await ask(fleet)
    await collector.arrived.wait()
    for _ in range(3):
        await ask(fleet)
    await fleet.idle()
    assert len(collector.spans) == 6
    collector.open.set()
    await fleet.stop()
    assert len(collector.spans) == 12


class Refusing(SpanExporter):
    """A collector that holds its first answer until `answer` is set, and takes nothing."""

    def __init__(self) -> None:
        self.asked, self.answer = threading.Event(), threading.Event()
        self.batches = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.batches += 1
        self.asked.set()
        assert self.answer.wait(10)
        return SpanExportResult.FAILURE


async def test_collector_that_fails_at_the_end_is_asked_once_and_not_for_every_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(span_export, "BATCH", 2)
    monkeypatch.setattr(span_export, "FLUSH_S", 60.0)
    collector, counted = Refusing(), Counter[str]()
    export = SpanExport(collector, lambda result, spans: counted.update({result: spans}))
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(export)
    tracer = provider.get_tracer("test")
    for number in range(10):
        tracer.start_span("a").end()
        if number == 1:
            assert await asyncio.to_thread(collector.asked.wait, 10)
    closing = asyncio.create_task(export.aclose())
    await asyncio.sleep(0)
    collector.answer.set()
    await asyncio.wait_for(closing, 10)
    assert collector.batches == 1
    assert counted == {"failed": 10}


async def test_a_proxy_without_the_extra_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.startswith("opentelemetry")]:
        monkeypatch.setitem(sys.modules, name, None)
    for name in ("spans", "span_export"):
        monkeypatch.delitem(sys.modules, f"gorgo.live.telemetry.{name}", raising=False)
    with pytest.raises(MissingExtra, match=r"pip install 'gorgo-router\[otel\]'"):
        make_tracing(TracingConfig(endpoint="http://127.0.0.1:1/v1/traces"), region="here", count=lambda *_: None)


async def test_headers_for_the_collector_come_from_the_environment(
    start: Start, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-collector-key=abc")
    fleet = await start.fleet([GOOD], proxy=traced(collector))
    await ask(fleet)
    await sent(fleet, collector)
    assert collector.headers[0]["x-collector-key"] == "abc"


# --- Traces of requests behind Envoy: the same spans as the proxy's, and never what a client or an engine said.


ROOT = "POST /v1/chat/completions"


@dataclass
class Traced:
    """A picker whose spans go to a collector."""

    state: PickerState
    collector: Collector

    @property
    def picker(self) -> VirtualPicker:
        return VirtualPicker(self.state)

    async def spans(self) -> dict[str, list[Received]]:
        """Spans by name, once all are sent."""
        await self.state.live.aclose()
        found: dict[str, list[Received]] = {}
        for span in sorted(self.collector.spans, key=lambda span: span.start_ns):
            found.setdefault(span.name, []).append(span)
        return found


@asynccontextmanager
async def tracing(ratio: float = 1.0) -> AsyncIterator[Traced]:
    async with collecting() as collector:
        config = config_of(
            *("10.0.0.1:8000", "10.0.0.2:8000"),
            proxy=traced(collector, ratio=ratio),
            overload=OverloadConfig(no_replica_wait_s=0.0),
        )
        wiring: dict[str, Any] = {"weights": None, "environ": {}, "key": 1, "seed": 1, "tls": system_tls()}
        state = PickerState(build_live(config, policy=make_policy("round-robin"), kind=PICKER, **wiring))
        for name in state.replicas.targets:
            state.routing.router.replicas.on_probe(name, 0.01, now=state.routing.clock())
        yield Traced(state, collector)


@pytest.fixture
async def running() -> AsyncIterator[Traced]:
    async with tracing() as found:
        yield found


def served(running: Traced, *headers: tuple[str, str]) -> Picked:
    """One request of an own Envoy to its end."""
    picker = running.picker
    call, picked = picker.request(BODY, *headers)
    picker.first_bytes(picked.exchange_id, delta("a")).close()
    call.close()
    usage = {"prompt_tokens": 12, "completion_tokens": 5, "cached_tokens": 8}
    take_access_log(running.state, log_message(picked.exchange_id, usage=usage))
    return picked


async def test_a_request_behind_envoy_is_a_span_with_its_decision_attempt_and_first_content(running: Traced) -> None:
    picked = served(running, ("x-request-id", "r-1"))
    spans = await running.spans()
    assert {name: len(found) for name, found in spans.items()} == dict.fromkeys(
        (ROOT, "decision", "attempt", "first content"), 1
    )
    (root,), (decision,), (attempt,), (first,) = (
        spans[name] for name in (ROOT, "decision", "attempt", "first content")
    )
    assert {span.trace_id for found in spans.values() for span in found} == {root.trace_id}
    assert (root.parent_id, decision.parent_id, attempt.parent_id) == ("", root.span_id, root.span_id)
    assert first.parent_id == attempt.span_id
    assert root.start_ns <= decision.start_ns <= decision.end_ns == attempt.start_ns
    assert first.end_ns <= attempt.end_ns <= root.end_ns
    assert picked.headers["traceparent"] == f"00-{root.trace_id}-{attempt.span_id}-01"
    assert (root.attributes["gorgo.request_id"], root.attributes["http.response.status_code"]) == ("r-1", 200)
    assert (attempt.attributes["gorgo.replica"], attempt.attributes["gorgo.result"]) == ("r0", "completed")
    assert (attempt.attributes["gen_ai.usage.output_tokens"], attempt.attributes["gorgo.cached_tokens"]) == (5, 8)


async def test_a_client_s_trace_goes_on_and_its_no_is_a_no() -> None:
    async with tracing(ratio=0.0) as running:
        picked = served(running, ("traceparent", SAMPLED), ("tracestate", "vendor=1"))
        passed = served(running, ("traceparent", NOT_SAMPLED), ("tracestate", "vendor=1"))
        spans = await running.spans()
        (root,), (attempt,) = spans[ROOT], spans["attempt"]
        assert (root.trace_id, root.parent_id) == (TRACE_ID, PARENT_ID)
        assert picked.headers["traceparent"] == f"00-{TRACE_ID}-{attempt.span_id}-01"
        assert "traceparent" not in passed.headers
        for each in (picked, passed):
            assert not {"traceparent", "tracestate"} & set(each.common.header_mutation.remove_headers)


async def test_a_new_trace_has_no_state_of_another(running: Traced) -> None:
    picked = served(running, ("traceparent", "nonsense"), ("tracestate", "vendor=1"))
    assert "tracestate" in picked.common.header_mutation.remove_headers
    assert picked.headers["traceparent"].endswith("-01")
    (root,) = (await running.spans())[ROOT]
    assert root.parent_id == ""


async def test_a_retry_of_envoy_is_a_failed_attempt_and_another(running: Traced) -> None:
    call, picked = running.picker.request()
    call.close()
    take_access_log(running.state, log_message(picked.exchange_id, served="10.0.0.2:8000"))
    spans = await running.spans()
    found = [(span.attributes["gorgo.replica"], span.attributes["gorgo.result"]) for span in spans["attempt"]]
    assert sorted(found)[0] == ("r0", "failed_before_content")
    assert [span.failed for span in spans["attempt"] if span.attributes["gorgo.replica"] == "r0"] == [True]
    assert {replica for replica, _ in found} == {"r0", "r1"}
    assert spans[ROOT][0].attributes["gorgo.retries"] == 1


async def test_a_refusal_is_a_span_with_its_code(running: Traced) -> None:
    for name in ("r0", "r1"):
        running.state.routing.router.replicas.drain(name, now=running.state.routing.clock())
    call, _ = running.picker.request()
    call.close()
    spans = await running.spans()
    (root,) = spans[ROOT]
    assert (root.attributes["error.type"], root.attributes["http.response.status_code"]) == ("no_replica", 503)
    assert (root.failed, "attempt" in spans) == (True, False)


@pytest.mark.parametrize("front", ["own", "gateway"])
async def test_no_prompt_model_key_or_answer_is_in_a_span(running: Traced, front: str) -> None:
    secrets = ["my-own-words", "my-own-model", "my-own-key", "my-own-cookie", "the-engine-said"]
    words, model, key, cookie, said = secrets
    body = BODY.replace(b"hello", words.encode()).replace(b'"m"', f'"{model}"'.encode())
    headers = (("authorization", f"Bearer {key}"), ("cookie", cookie))
    picker = running.picker
    if front == "own":
        call, picked = picker.request(body, *headers)
        picker.first_bytes(picked.exchange_id, delta(said)).close()
        call.close()
        take_access_log(running.state, log_message(picked.exchange_id, status=500))
    else:
        call = begin(picker, *headers)
        call.feed(body_message("request_body", body))
        call.feed(headers_message("response_headers", *EVENTS, ("x-engine", said)))
        call.feed(body_message("response_body", delta(said) + USAGE + DONE))
        call.close()
    await running.spans()
    assert len(running.collector.spans) >= 4
    told = b"".join(running.collector.bodies)
    assert [word for word in secrets if word.encode() in told] == []
