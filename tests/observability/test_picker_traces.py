"""Traces of requests behind Envoy: the same spans as the proxy's, and never what a client or an engine said."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from gorgo.config.model import OverloadConfig
from gorgo.live.build import build_live
from gorgo.picker.server import take_access_log
from gorgo.picker.state import PICKER, PickerState
from gorgo.policies.registry import make_policy
from tests.observability.collector import Collector, Received, collecting
from tests.observability.test_traces import NOT_SAMPLED, PARENT_ID, SAMPLED, TRACE_ID, traced
from tests.picker.duplex import EVENTS, begin
from tests.picker.virtual import BODY, Picked, VirtualPicker, body_message, config_of, headers_message, log_message
from tests.proxy.conftest import system_tls
from tests.proxy.fakes import DONE, USAGE, delta

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


async def test_a_request_is_a_span_with_its_decision_attempt_and_first_content(running: Traced) -> None:
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
