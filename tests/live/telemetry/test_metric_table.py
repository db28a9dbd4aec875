"""The proxy's labels and buckets as the table has them."""

from __future__ import annotations

from gorgo.live.telemetry.metric_table import LABELS, METRICS, buckets_of
from tests.observability.test_tables import labels_after


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
