"""Attributes of a request's spans, one by one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from gorgo.core.messages.actions import Dispatch
from gorgo.core.messages.request import AttemptResult, Outcome
from gorgo.live.telemetry.spans import Trace
from tests.live.admin.page.made import decision

#: What a decision without a cost, a prediction and a fallback says.
BARE = {
    "gorgo.policy": "nearest",
    "gorgo.replica": "a",
    "gorgo.region": "region-of-a",
    "gorgo.weights_version": 1,
    "gorgo.candidates": 2,
    "gorgo.prompt_tokens": 256,
    "gorgo.estimated_cached_tokens": 0,
    "gorgo.best_cached_tokens": 0,
}


def dispatch() -> Dispatch:
    bare = decision(
        "r",
        candidates=("a", "b"),
        policy="nearest",
        weights_version=1,
        prompt_tokens=256,
        estimated_cached_tokens=0,
        best_cached_tokens=0,
        predicted_ttft_s=None,
        fallback=None,
        unit="",
        cost=None,
        terms={},
    )
    return Dispatch("r", "r/1", 1, "a", "region-of-a", bare)


def spans_of(chosen: Dispatch, outcome: Outcome) -> dict[str, dict[str, object]]:
    """Attributes by the span's name."""
    kept = InMemorySpanExporter()
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(SimpleSpanProcessor(kept))
    trace = Trace(provider.get_tracer("test"), None, route="/v1/chat/completions", request_id="r", received_s=0.5)
    trace.attempt_started(chosen)
    trace.attempt_ended(chosen, outcome, now=2.0)
    return {span.name: dict(span.attributes or {}) for span in kept.get_finished_spans()}


@pytest.mark.parametrize(
    ("change", "more"),
    [
        ({}, {}),
        ({"fallback": "no_match"}, {"gorgo.fallback": "no_match"}),
        ({"predicted_ttft_s": 0.25}, {"gorgo.predicted_ttft_ms": 250.0}),
        ({"unit": "ms"}, {"gorgo.unit": "ms"}),
        ({"cost": np.array([3.0, 4.0])}, {"gorgo.cost": 3.0}),
        ({"terms": {"rtt": np.array([1.5, 2.5])}}, {"gorgo.term.rtt": 1.5}),
        ({"terms": {"rtt": np.array([np.nan, 2.5])}}, {}),
        ({"row": 1, "terms": {"rtt": np.array([1.5, 2.5])}}, {"gorgo.replica": "b", "gorgo.term.rtt": 2.5}),
        ({"estimated_cached_tokens": 64, "best_cached_tokens": 128}, None),
    ],
)
def test_a_decision_says_what_is_known_of_it_and_nothing_else(
    change: dict[str, object], more: dict[str, object] | None
) -> None:
    found = dispatch()
    wanted = more or {f"gorgo.{name}": value for name, value in change.items() if more is None}
    chosen = replace(found, decision=replace(found.decision, **change))  # type: ignore[arg-type]
    assert spans_of(chosen, Outcome(AttemptResult.COMPLETED, 200))["decision"] == BARE | wanted


@pytest.mark.parametrize(
    ("outcome", "more"),
    [
        (Outcome(AttemptResult.CLIENT_DISCONNECTED), {}),
        (
            Outcome(AttemptResult.COMPLETED, 200, prompt_tokens=12, output_tokens=3, cached_tokens=8),
            {
                "http.response.status_code": 200,
                "gen_ai.usage.input_tokens": 12,
                "gen_ai.usage.output_tokens": 3,
                "gen_ai.usage.cache_read.input_tokens": 8,
                "gorgo.cached_tokens": 8,
            },
        ),
        (Outcome(AttemptResult.FAILED_BEFORE_CONTENT, error="timeout"), {"error.type": "timeout"}),
    ],
)
def test_an_attempt_says_where_it_went_and_what_is_known_of_its_end(outcome: Outcome, more: dict[str, object]) -> None:
    where = {"gorgo.replica": "a", "gorgo.region": "region-of-a", "gorgo.attempt": 1, "gen_ai.operation.name": "chat"}
    assert spans_of(dispatch(), outcome)["attempt"] == where | {"gorgo.result": outcome.result.value} | more
