"""docs/observability.md against the dashboard, the tables, the spans and the configuration that it speaks of."""

from __future__ import annotations

import re

import yaml

from gorgo.config.load import parse_config
from gorgo.core.latency.ttft import PARTS
from gorgo.core.metric_spec import label_of
from gorgo.live.telemetry.metric_table import LABELS, METRICS
from gorgo.live.telemetry.spans import MAX_WAITING
from tests.documents import DOCS, ROOT, blocks, code, rows_of
from tests.observability.promql import alerts, panels
from tuner.sidecar.metrics import METRICS as TUNER_METRICS

PAGE = (DOCS / "observability.md").read_text()
QUESTIONS = rows_of(PAGE, "question", "panel of the dashboard", "figure or route")
SPECS = {spec.name: spec for spec in (*METRICS, *TUNER_METRICS)}


def test_every_question_has_panels_that_exist_or_a_route() -> None:
    titles = {panel["title"] for panel in panels()}
    for question, named, answer in QUESTIONS:
        assert question.endswith("?")
        wanted = {title.strip() for title in named.split(";")} - {"-"}
        found = {title for title in titles for want in wanted if title.startswith(want)}
        assert len(found) >= len(wanted), (question, wanted)
        assert wanted or "/admin/" in answer or "#traces" in answer


def test_every_figure_on_the_page_exists_with_the_labels_named_beside_it() -> None:
    named = {word for word in code(PAGE) if word.startswith("gorgo_")}
    assert {re.sub(r"\{.*", "", name) for name in named} <= set(SPECS)
    assert len(named) >= 30
    for _, _, answer in QUESTIONS:
        for name, labels in re.findall(r"`(gorgo_\w+)` by ((?:`(?!gorgo_)\w+`(?:, )?)+)", answer):
            assert set(code(labels)) <= set(SPECS[name].labels), name


def test_values_on_the_page_are_values_of_their_labels() -> None:
    (row,) = [row for row in QUESTIONS if row[0].startswith("What is refused")]
    assert set(code(row[2])) - {"gorgo_rejects_total", "reason"} <= set(
        label_of("gorgo_rejects_total", "reason", LABELS).values
    )


def test_parts_on_the_page_are_the_parts() -> None:
    assert [code(row[0])[0] for row in rows_of(PAGE, "part", "is", "how it is known")] == list(PARTS)


def test_routes_on_the_page_exist() -> None:
    source = (ROOT / "gorgo/live/admin/app.py").read_text()
    routes = re.findall(r"`(?:GET )?(/admin/[^`]*)`", PAGE)
    assert len(routes) >= 3
    for route in routes:
        assert f'"{route.split("{")[0]}' in source, route


def test_configuration_on_the_page_is_taken() -> None:
    prometheus, proxy = blocks(PAGE, "yaml")
    assert yaml.safe_load(prometheus)["rule_files"] == ["gorgo-rules.yml"]
    jobs = {job["job_name"] for job in yaml.safe_load(prometheus)["scrape_configs"]}
    assert {job for rule in alerts() for job in re.findall(r'job="([^"]*)"', rule["expr"])} <= jobs
    shipped, tracing = (ROOT / "regions.yaml").read_text(), proxy.splitlines()[1]
    config = parse_config(shipped.replace("proxy:\n", f"proxy:\n{tracing}\n", 1).encode(), source="the page")
    assert config.proxy.tracing.endpoint == "http://127.0.0.1:4318/v1/traces"
    assert f"{MAX_WAITING:,} spans" in PAGE


def test_spans_on_the_page_are_the_spans() -> None:
    source = (ROOT / "gorgo/live/telemetry/spans.py").read_text()
    names = [code(row[0])[0] for row in rows_of(PAGE, "span", "from, to", "attributes")]
    assert names == ["POST /v1/...", "decision", "attempt", "first content"]
    assert all(f'"{name}"' in source for name in names[1:])
