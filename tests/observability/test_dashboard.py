"""The dashboard and the alerts: what Grafana wants of the one, and that both ask for what the processes show."""

from __future__ import annotations

import re
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
import yaml
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from gorgo.core.limits import BufferBudget
from gorgo.core.metric_spec import label_of
from gorgo.core.router import Router
from gorgo.live.telemetry.metric_table import LABELS, METRICS
from gorgo.live.telemetry.metrics import Metrics
from gorgo.policies.registry import make_policy
from tests.core.routers import specs
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
from tuner.sidecar.metrics import TunerMetrics

ROOT = Path(__file__).parents[2]
TARGETS = [*dashboard_targets(), *alert_targets()]
#: Of Prometheus itself, and its labels of every series.
_OTHERS = ("up",)
_TARGET_LABELS = {"job", "instance"}
#: Of Envoy: tests/system/test_alerts.py scrapes it.
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
