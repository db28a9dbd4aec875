"""The runbook against the code: its commands, queries, routes and words exist."""

from __future__ import annotations

import re
from typing import Any

import yaml

from gorgo.live.telemetry.metrics import METRICS
from tests.documents import DOCS, ROOT, blocks, check_gorgo_lines, code, headings, rows_of, section
from tuner.sidecar.metrics import METRICS as TUNER_METRICS

RUNBOOK = (DOCS / "runbook.md").read_text()
#: What each situation has, in this order.
PARTS = ("**Symptom.**", "**Look.**", "**Likely causes", "**Do.**", "**Over when**", "**Do not**")
#: Of prometheus_client, under the proxy's own prefix; they exist on Linux only, so they are named here.
PROCESS = {
    "gorgo_process_resident_memory_bytes",
    "gorgo_process_open_fds",
    "gorgo_process_start_time_seconds",
}
#: Of Envoy.
ENVOYS = {"envoy_http_ext_proc_failure_mode_allowed"}
_SUFFIXES = ("_bucket", "_sum", "_count")

SPECS: dict[str, Any] = {spec.name: spec for spec in (*METRICS, *TUNER_METRICS)}
QUERIES = [line for block in blocks(RUNBOOK, "promql") for line in block.splitlines()]


def _metric(name: str) -> str:
    """The metric that a series belongs to."""
    stem = next((name.removesuffix(end) for end in _SUFFIXES if name.endswith(end)), name)
    return stem if stem in SPECS and SPECS[stem].kind == "histogram" else name


def test_every_situation_says_what_to_see_to_do_and_not_to_do() -> None:
    for heading in headings(RUNBOOK):
        text = section(RUNBOOK, f"## {heading}")
        places = [text.find(part) for part in PARTS]
        assert -1 not in places, (heading, dict(zip(PARTS, places, strict=True)))
        assert places == sorted(places), heading
        assert blocks(text, "promql"), f"{heading}: a way to see it on a dashboard"
        assert blocks(text, "sh"), f"{heading}: a command to look or act with"


def test_commands_exist_with_the_options_that_they_are_given() -> None:
    assert check_gorgo_lines(RUNBOOK) >= 25


def test_metrics_of_queries_exist() -> None:
    named = {_metric(name) for query in QUERIES for name in re.findall(r"\bgorgo_\w+", query)}
    assert named <= set(SPECS) | PROCESS
    assert len(named) >= 25


def test_labels_of_queries_are_labels_of_their_metrics() -> None:
    assert [query for query in QUERIES if unknown_labels(query) or query.count("(") != query.count(")")] == []


def unknown_labels(query: str) -> set[tuple[str, str]]:
    """Metric and label of each label that the metric lacks."""
    named = [name for name in re.findall(r"\b(gorgo_\w+)", query) if name not in PROCESS]
    used = {
        (name, label)
        for name, selector in re.findall(r"\b(gorgo_\w+)\{([^}]*)\}", query)
        for label in re.findall(r"(\w+)=", selector)
    }
    grouped = {label.strip() for found in re.findall(r"by \(([^)]*)\)", query) for label in found.split(",")} - {"le"}
    used |= {(name, label) for name in named for label in grouped}
    return {(name, label) for name, label in used if label not in SPECS[_metric(name)].labels}


def test_buckets_are_asked_of_histograms_and_rates_of_counters() -> None:
    for query in QUERIES:
        for name in re.findall(r"\b(?:rate|increase)\((gorgo_\w+)", query):
            spec = SPECS[_metric(name)]
            assert spec.kind == ("histogram" if name.endswith("_bucket") else "counter"), query


def test_routes_of_calls_exist_with_their_methods() -> None:
    """The table of routes is compared with the code in test_docs.py."""
    documents = "".join(path.read_text() for path in (ROOT / "README.md", *DOCS.glob("*.md")))
    routes = re.findall(r"^- `([A-Z]+) (/admin/[^`]*)`:", documents, flags=re.MULTILINE)
    shell = "".join(blocks(RUNBOOK, "sh")).replace("\\\n", " ")
    calls = [line for line in shell.splitlines() if "/admin/" in line]
    assert len(calls) >= 5
    for call in calls:
        method = (re.search(r"-X (\w+)", call) or ["", "GET"])[1]
        (path,) = re.findall(r"http://127\.0\.0\.1:9090(/admin/[\w/-]*)", call)
        patterns = [re.sub(r"\{\w+\}", "[^/]+", route) for allowed, route in routes if allowed == method]
        assert any(re.fullmatch(pattern, path) for pattern in patterns), call


def test_every_alert_leads_to_a_section() -> None:
    rules = yaml.safe_load((ROOT / "terraform/modules/observability/gorgo-rules.yml").read_text())
    alerts = {rule["alert"] for group in rules["groups"] for rule in group["rules"]}
    assert {alert for row in rows_of(RUNBOOK, "alert", "section") for alert in code(row[0])} == alerts


def test_events_codes_and_keys_are_words_of_the_code() -> None:
    sources = "".join(path.read_text() for top in ("gorgo", "tuner") for path in (ROOT / top).rglob("*.py"))
    known = set(re.findall(r"\w+", sources)) | PROCESS | ENVOYS
    prose = re.sub(r"^```.*?^```", "", RUNBOOK, flags=re.MULTILINE | re.DOTALL)
    words = {word for found in code(prose) for word in re.findall(r"\w+_\w+", found)}
    grepped = set(re.findall(r"[a-z]+_[a-z_]+", " ".join(re.findall(r"grep -\w+ '([^']*)'", RUNBOOK))))
    assert {_metric(word) for word in words | grepped} <= known
    assert len(grepped) >= 8
