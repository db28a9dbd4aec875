from __future__ import annotations

from dataclasses import replace
from math import isnan
from pathlib import Path
from urllib.request import urlopen

import pytest

from tests.observability.test_tables import labels_after
from tests.tuner.history.examples import generation
from tests.tuner.sidecar.fake_proxy import Beside, FakeProxy
from tuner.sidecar.metrics import LABELS, METRICS, TunerMetrics, listening
from tuner.sidecar.progress import Progress

PROGRESS = Progress(
    phase="comparing",
    generation=3,
    arm="offspring",
    weights={"w_rtt": 0.6},
    incumbent={"w_rtt": 0.5},
    ttft_ms_p95=400.0,
    samples=40,
    needed=128,
)


def value(metrics: TunerMetrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(f"gorgo_tuner_{name}", labels)


def test_counters_are_there_before_anything_has_happened() -> None:
    metrics = TunerMetrics()
    assert value(metrics, "generations_total", outcome="accepted") == 0
    assert value(metrics, "generations_total", outcome="rejected") == 0
    assert value(metrics, "polls_total", result="ok") == 0
    assert value(metrics, "rollbacks_total") == 0


def test_a_generation_is_counted_by_its_outcome_and_its_figures_are_seconds() -> None:
    metrics = TunerMetrics()
    metrics.generation(generation(1, objective_ms=300.0, incumbent_objective_ms=400.0, sigma=0.4, accepted=False))
    assert value(metrics, "generations_total", outcome="accepted") == 0
    assert value(metrics, "generations_total", outcome="rejected") == 1
    assert value(metrics, "objective_seconds", arm="offspring") == 0.3
    assert value(metrics, "objective_seconds", arm="incumbent") == 0.4
    assert value(metrics, "sigma") == 0.4
    metrics.generation(generation(2, objective_ms=None, incumbent_objective_ms=None, sigma=None))
    assert value(metrics, "generations_total", outcome="accepted") == 1
    assert value(metrics, "objective_seconds", arm="offspring") == 0.3, "what is not known changes nothing"
    assert value(metrics, "sigma") == 0.4


def test_where_the_campaign_is() -> None:
    metrics = TunerMetrics()
    metrics.progress(PROGRESS, waiting=7)
    assert value(metrics, "weight", weight="w_rtt", set="in_force") == 0.6
    assert value(metrics, "weight", weight="w_rtt", set="incumbent") == 0.5
    assert value(metrics, "generation") == 3
    assert value(metrics, "window_ttft_seconds") == 0.4
    assert (value(metrics, "comparing"), value(metrics, "paused")) == (1, 0)
    assert value(metrics, "history_waiting_rows") == 7
    metrics.progress(replace(PROGRESS, phase="frozen", weights=None, ttft_ms_p95=None), waiting=0)
    assert (value(metrics, "comparing"), value(metrics, "paused")) == (0, 1)
    assert isnan(value(metrics, "window_ttft_seconds") or 0.0)
    assert value(metrics, "history_waiting_rows") == 0


def test_counts_go_up_by_what_they_are_told() -> None:
    metrics = TunerMetrics()
    metrics.count("gorgo_tuner_samples_total", by=5)
    metrics.count("gorgo_tuner_samples_total")
    metrics.count("gorgo_tuner_polls_total", "failed")
    assert value(metrics, "samples_total") == 6
    assert value(metrics, "polls_total", result="failed") == 1
    assert value(metrics, "polls_total", result="ok") == 0


async def test_figures_follow_the_campaign(tmp_path: Path) -> None:
    beside = Beside(FakeProxy(), tmp_path)
    await beside.start()
    await beside.until_generation(4)
    beside.proxy.down = True
    await beside.step()
    outcomes = [value(beside.metrics, "generations_total", outcome=how) or 0 for how in ("accepted", "rejected")]
    assert sum(outcomes) == 4
    assert value(beside.metrics, "polls_total", result="failed") == 1
    assert value(beside.metrics, "samples_total") == beside.sidecar.campaign.cursor.last_seq
    assert value(beside.metrics, "weight", weight="w_rtt", set="in_force") == beside.proxy.weights["w_rtt"]
    assert value(beside.metrics, "sigma") == beside.history.generations()[-1].sigma


def test_they_are_served_until_the_end_and_a_taken_port_is_an_error() -> None:
    with listening(TunerMetrics(), ("127.0.0.1", 0)) as port:
        with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
            text = answer.read().decode()
        assert all(spec.name in text for spec in METRICS)
        assert port is not None
        with pytest.raises(OSError, match="in use"), listening(TunerMetrics(), ("127.0.0.1", port)):
            pass
    with pytest.raises(OSError, match="refused"):
        urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10)


def test_without_an_address_nothing_listens() -> None:
    with listening(TunerMetrics(), None) as port:
        assert port is None


def test_labels_are_the_documented_ones() -> None:
    documented = list(labels_after("Labels of the tuner:"))
    assert documented == [(spec.label, spec.of, spec.meaning, spec.values, spec.at_most) for spec in LABELS]
