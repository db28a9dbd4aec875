"""The dashboard, the alerts, docs/observability.md and the tables of metrics, against each other and against the
code.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import yaml
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from gorgo.config.load import parse_config
from gorgo.core.latency.ttft import PARTS
from gorgo.core.limits import BufferBudget
from gorgo.core.metric_spec import LabelSpec, MetricSpec, label_of
from gorgo.core.router import Router
from gorgo.live.request.parse import INFERENCE_ROUTES
from gorgo.live.telemetry.metric_table import LABELS, METRICS, REJECT_CODES, buckets_of
from gorgo.live.telemetry.metrics import Metrics
from gorgo.live.telemetry.spans import MAX_WAITING
from gorgo.policies.registry import make_policy
from tests.core.routers import specs
from tests.documents import DOCS, ROOT, blocks, code, rows_of
from tests.observability.promql import (
    INTERVAL,
    Target,
    alert_targets,
    alerts,
    dashboard,
    dashboard_targets,
    panels,
    series_labels,
)
from tuner.sidecar.metrics import LABELS as TUNER_LABELS
from tuner.sidecar.metrics import METRICS as TUNER_METRICS
from tuner.sidecar.metrics import TunerMetrics

# --- The dashboard and the alerts: what Grafana wants of the one, and that both ask for what the processes show.


TARGETS = [*dashboard_targets(), *alert_targets()]
#: Of Prometheus itself, and its labels of every series.
_OTHERS = ("up",)
_TARGET_LABELS = {"job", "instance"}
#: Of Envoy: tests/system/test_prometheus.py scrapes it.
_ENVOYS = re.compile(r"\benvoy_\w+")


@pytest.fixture(scope="module")
def shown() -> set[str]:
    """Every series name of the two expositions, read back from their text."""
    router = Router(specs("a"), make_policy("gorgo-ms"), rng=np.random.default_rng(0), boot_id="boot")
    texts = (Metrics(router, lambda: 0.0, BufferBudget(1)).exposition(), generate_latest(TunerMetrics().registry))
    names: set[str] = set()
    for text in texts:
        for family in text_string_to_metric_families(text.decode()):
            ends = ("_bucket", "_sum", "_count") if family.type == "histogram" else ("",)
            total = "_total" if family.type == "counter" else ""
            names |= {f"{family.name}{total}{end}" for end in ends}
    return names


def test_metrics_of_queries_are_exposed(shown: set[str]) -> None:
    assert len(TARGETS) > 60
    assert [target for target in TARGETS if not target.names and not target.expr.startswith(_OTHERS)] == []
    assert [target for target in TARGETS if not target.names <= shown] == []


def test_labels_of_queries_are_labels_of_their_metrics() -> None:
    known = series_labels()
    for target in TARGETS:
        for name, label, value in target.labels_used():
            assert label in known.get(name, set()) | _TARGET_LABELS, target
            if value is not None and label not in _TARGET_LABELS and not value.startswith("$"):
                values = label_of(name, label, (*LABELS, *TUNER_LABELS)).values
                assert not values or value in values, (target, label, value)


def test_legends_name_labels_that_the_query_leaves() -> None:
    known = series_labels()
    for target in TARGETS:
        grouped = {label.strip() for group in re.findall(r"by \(([^)]*)\)", target.expr) for label in group.split(",")}
        plain = set().union(*(known.get(name, set()) for name in target.names)) if "by (" not in target.expr else set()
        named = set(re.findall(r"\{\{(\w+)\}\}", target.legend))
        assert named <= (grouped | plain | (set() if grouped else _TARGET_LABELS)) - {"le"}, target


def test_every_query_heeds_the_choice_of_router_region_and_model() -> None:
    known = series_labels()
    for target in dashboard_targets():
        for name in target.names:
            if name.startswith("gorgo_tuner_"):
                continue  # one tuner has many routers
            for label in ("instance", *sorted({"region", "model"} & known.get(name, set()))):
                assert re.search(rf'{name}\{{[^}}]*{label}=~"\${label}"', target.expr), (target, name, label)


def test_brackets_of_queries_close() -> None:
    for opening, closing in ("()", "[]", "{}"):
        assert [target for target in TARGETS if target.expr.count(opening) != target.expr.count(closing)] == []


def test_rates_are_over_grafana_s_own_interval() -> None:
    for target in dashboard_targets():
        assert set(re.findall(r"\[([^\]]*)\]", target.expr)) <= {INTERVAL}
        counters = [name for name in target.names if name.endswith(("_total", "_bucket", "_count", "_sum"))]
        assert not counters or INTERVAL in target.expr or target.title == "Generation", target


def test_every_metric_has_a_panel_an_alert_or_a_reason_not_to() -> None:
    #: Told by others: what was built, sizes of what is drawn as times, of the index, and times that alerts need no more
    #: than a person.
    # Wrong admin tokens are a line of the log, which an operator reads where a guess is of interest.
    beside = {"gorgo_build_info", "gorgo_in_flight_tokens", "gorgo_admin_refused_total"}
    # Refusals are drawn by reason; the bytes say how near the next one is.
    beside |= {"gorgo_buffered_bytes"}
    beside |= {"gorgo_queued_prefill_tokens", "gorgo_index_blocks", "gorgo_output_tokens_total"}
    beside |= {"gorgo_config_reloads_total", "gorgo_config_last_reload_timestamp_seconds"}
    # Few policies learn; docs/observability.md has the questions to these.
    beside |= {metric.name for metric in METRICS if metric.name.startswith(("gorgo_model_", "gorgo_training_"))}
    beside |= {"gorgo_fallbacks_total"}
    beside -= {"gorgo_build_info", "gorgo_model_writes_total"}
    # Exact prompts matter to models with a tokenizer alone.
    beside |= {"gorgo_exact_prompts_total"}
    # The alert has the phantoms; the others lead from it to the feed, in the runbook.
    beside |= {f"gorgo_cache_{word}" for word in ("source_total", "reported_blocks", "report_age_seconds")}
    beside |= {"gorgo_cache_missed_tokens_total", "gorgo_cache_reports_total"}
    # `GET /admin/fleet` has the problems by name.
    beside |= {f"gorgo_fleet_source_{word}" for word in ("age_seconds", "replicas", "problems")}
    # Of one policy, of streams that were sent on, and of what is learned: `gorgo status` and the status page have them.
    beside |= {metric.name for metric in METRICS if metric.name.startswith(("gorgo_route", "gorgo_stream"))}
    beside |= {"gorgo_parallel_prefills"}
    # An autoscaler reads it, and draws it beside the replicas that it has started.
    beside |= {"gorgo_replicas_wanted"}
    # For dashboards that know OpenTelemetry's conventions, and not this router.
    beside |= {metric.name for metric in METRICS if metric.name.startswith("gen_ai_")}
    queried = {re.sub(r"_(bucket|sum|count)$", "", name) for target in TARGETS for name in target.names}
    assert {metric.name for metric in METRICS} - queried == beside


# -- the form
def test_dashboard_has_what_grafana_wants() -> None:
    found = dashboard()
    assert found["schemaVersion"] >= 36, "data sources by uid"
    assert re.fullmatch(r"[a-zA-Z0-9_-]{1,40}", found["uid"])
    assert "id" not in found, "a number of one Grafana's own"
    source, *chosen = found["templating"]["list"]
    assert (source["type"], source["query"]) == ("datasource", "prometheus")
    own = {"type": "prometheus", "uid": f"${{{source['name']}}}"}
    assert [variable["name"] for variable in chosen] == ["instance", "region", "model"]
    for variable in chosen:
        assert (variable["type"], variable["datasource"], variable["multi"]) == ("query", own, True)
        assert variable["allValue"] == ".*", "also series without the label"
        name, label = re.fullmatch(r"label_values\((gorgo_\w+)(?:\{.*\})?, (\w+)\)", variable["query"]).groups()  # type: ignore[union-attr]
        assert label in series_labels()[name] | _TARGET_LABELS
    for panel in panels():
        assert panel["datasource"] == own
        assert panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert [target["refId"] for target in panel["targets"]] == [chr(65 + n) for n in range(len(panel["targets"]))]
        assert all(target["datasource"] == own for target in panel["targets"])


def test_panels_stand_beside_each_other_within_the_width() -> None:
    everything = dashboard()["panels"]
    assert len({panel["id"] for panel in everything}) == len(everything)
    places = [panel["gridPos"] for panel in everything]
    assert all(place["x"] >= 0 and place["x"] + place["w"] <= 24 and place["h"] > 0 for place in places)

    def apart(one: dict[str, int], other: dict[str, int], at: str, size: str) -> bool:
        return one[at] + one[size] <= other[at] or other[at] + other[size] <= one[at]

    for one, other in combinations(places, 2):
        assert apart(one, other, "x", "w") or apart(one, other, "y", "h"), (one, other)


def test_every_alert_says_how_bad_it_is_and_what_to_do() -> None:
    runbook = (ROOT / "docs/runbook.md").read_text()
    titles = [heading.lower() for heading in re.findall(r"(?m)^## (.*)", runbook)]
    anchors = {re.sub(r"[^a-z0-9 -]", "", title).replace(" ", "-") for title in titles}
    assert len({rule["alert"] for rule in alerts()}) == len(alerts()) >= 8
    for rule in alerts():
        assert rule["labels"]["severity"] in {"critical", "warning", "info"}
        assert rule["annotations"]["summary"].endswith(".")
        page, _, anchor = rule["annotations"]["runbook"].partition("#")
        assert (ROOT / page).is_file()
        assert anchor in anchors, rule["alert"]


def test_rules_have_the_form_that_prometheus_takes() -> None:
    """What `promtool check rules` says of them where it is; `make test-system` runs it."""
    duration = re.compile(r"(\d+(?:\.\d+)?)([smhd])")
    known = {"alert", "expr", "for", "labels", "annotations"}
    for rule in alerts():
        assert {"alert", "expr", "labels", "annotations"} <= set(rule) <= known, rule["alert"]
        assert re.fullmatch(r"Gorgo[A-Z]\w+", rule["alert"])
        assert set(rule["labels"]) == {"severity"}
        assert set(rule["annotations"]) == {"summary", "runbook"}
        windows = [*re.findall(r"\[([^\]:]+)(?::[^\]]*)?\]", rule["expr"]), rule.get("for", "0s")]
        assert all(duration.fullmatch(window) for window in windows), rule["alert"]
        assert 'job="' not in rule["expr"], "jobs are called as their operators call them"
        for text in rule["annotations"].values():
            labels = set(re.findall(r"\$labels\.(\w+)", text))
            known_labels = set().union(*(series_labels().get(name, set()) for name in Target("", rule["expr"]).names))
            assert labels <= known_labels | _TARGET_LABELS, rule["alert"]


def test_names_of_envoy_s_metrics_are_those_that_it_has_shown() -> None:
    named = {name for target in TARGETS for name in _ENVOYS.findall(target.expr)}
    assert named == {"envoy_http_ext_proc_failure_mode_allowed"}


def test_every_alert_is_tried_with_series_that_fire_it_and_series_that_do_not() -> None:
    cases = yaml.safe_load((Path(__file__).parent / "rules_test.yml").read_text())["tests"]
    tried = [(case["alertname"], bool(case.get("exp_alerts"))) for test in cases for case in test["alert_rule_test"]]
    assert set(tried) == {(rule["alert"], fires) for rule in alerts() for fires in (True, False)}


# --- docs/observability.md against the dashboard, the tables, the spans and the configuration that it speaks of.


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


# --- The tables of metrics and labels against the README and against the code that fills them.


BOTH = pytest.mark.parametrize(
    ("heading", "metrics", "labels"),
    [("Labels of the proxy:", METRICS, LABELS), ("Labels of the tuner:", TUNER_METRICS, TUNER_LABELS)],
    ids=["proxy", "tuner"],
)
#: Where the refusals of requests for a replica are made; those of operators and of small GET routes count elsewhere.
REFUSING = (
    "core/dispatch/in_flight.py",
    "core/limits.py",
    "live/http/body.py",
    "live/parsing/json_body.py",
    "live/parsing/workers.py",
    "live/request_options.py",
)
REFUSING_TOO = (
    "proxy/server.py",
    "proxy/exchange/exchange.py",
    "proxy/exchange/response.py",
    "live/request/parse.py",
    "live/request/record.py",
)
#: Of `/ready` alone, which is no request.
OF_READINESS = {"fleet_source_pending"}


def labels_after(text: str) -> Iterator[tuple[str, tuple[str, ...], str, tuple[str, ...], str]]:
    """Return label, metrics, meaning, values and bound of each item of the list after a text of the pages."""
    pages = "\n\n".join(page.read_text() for page in sorted((ROOT / "docs").glob("*.md")))
    assert pages.count(text) == 1, text
    for line in pages.split(text)[1].strip().split("\n\n")[0].splitlines():
        item = re.fullmatch(r"- `(\w+)`(?: of (.*?))? \(at most (.*?)\): (.*)", line)
        assert item, line
        meaning, _, values = item[4].partition(": ")
        yield (
            item[1],
            tuple(re.findall(r"`([^`]*)`", item[2] or "")),
            meaning,
            tuple(re.findall(r"`([^`]*)`", values)),
            item[3],
        )


@BOTH
def test_every_label_has_a_row_with_its_values_and_how_many_there_can_be(
    heading: str, metrics: Sequence[MetricSpec], labels: Sequence[LabelSpec]
) -> None:
    documented = list(labels_after(heading))
    assert documented == [(spec.label, spec.of, spec.meaning, spec.values, spec.at_most) for spec in labels]


@BOTH
def test_every_label_of_every_metric_has_one_bound(
    heading: str, metrics: Sequence[MetricSpec], labels: Sequence[LabelSpec]
) -> None:
    used = {label_of(metric.name, label, labels) for metric in metrics for label in metric.labels}
    assert used == set(labels)
    for metric in metrics:
        for label in metric.labels:
            assert (
                len([spec for spec in labels if spec.label == label and (not spec.of or metric.name in spec.of)]) == 1
            )
    assert all(bool(spec.values) != bool(spec.bound) for spec in labels)


@BOTH
def test_names_end_in_their_unit(heading: str, metrics: Sequence[MetricSpec], labels: Sequence[LabelSpec]) -> None:
    """As `promtool check metrics` wants: base units, `_total` for counters and for them alone."""
    for metric in metrics:
        assert re.fullmatch(r"(gorgo|gen_ai_server)_[a-z0-9]+(_[a-z0-9]+)*", metric.name)
        assert metric.name.endswith("_total") == (metric.kind == "counter"), metric.name
        assert not re.search(r"_(ms|us|kb|mb|minutes|hours)(_|$)", metric.name)
        assert metric.kind != "histogram" or metric.name.endswith(("_seconds", "_ratio"))


def test_buckets_of_every_histogram_ascend() -> None:
    for metric in METRICS:
        if metric.kind == "histogram":
            assert list(buckets_of(metric.name)) == sorted(set(buckets_of(metric.name)))


def codes(path: Path) -> Iterator[str]:
    """Of every refusal that a module makes, where it is a word in the source."""
    position = {"HttpError": 1, "Reject": 2, "QuotaExceeded": 0}
    for call in ast.walk(ast.parse(path.read_text())):
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id in position:
            if any(isinstance(each, ast.Starred) for each in call.args):
                continue  # made elsewhere, and passed on
            code = call.args[position[call.func.id]]
            if isinstance(code, ast.Constant):
                yield str(code.value)


def test_reasons_of_rejects_are_the_codes_that_the_source_has() -> None:
    found = {code for name in (*REFUSING, *REFUSING_TOO) for code in codes(ROOT / "gorgo" / name)}
    # The one route that is counted before it is known which one it is.
    assert found - OF_READINESS | {"not_found"} == set(REJECT_CODES)


def test_bound_of_routes_is_their_number() -> None:
    assert label_of("gorgo_requests_total", "route", LABELS).at_most == str(len(INFERENCE_ROUTES))
