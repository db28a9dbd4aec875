"""The tables of metrics and labels against the README and against the code that fills them."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from gorgo.core.metric_spec import LabelSpec, MetricSpec, label_of
from gorgo.live.request.parse import INFERENCE_ROUTES
from gorgo.live.telemetry.metric_table import LABELS, METRICS, REJECT_CODES, buckets_of
from tuner.sidecar.metrics import LABELS as TUNER_LABELS
from tuner.sidecar.metrics import METRICS as TUNER_METRICS

ROOT = Path(__file__).parents[2]
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
    "live/request_options.py",
    "live/http/body.py",
    "live/parsing/json_body.py",
    "live/parsing/json_body.py",
    "live/parsing/workers.py",
    "live/request_options.py",
)
REFUSING_TOO = (
    "proxy/server.py",
    "proxy/exchange/exchange.py",
    "proxy/exchange/exchange.py",
    "live/request/parse.py",
    "live/request/parse.py",
    "live/request/record.py",
)


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
    assert found | {"not_found"} == set(REJECT_CODES)


def test_bound_of_routes_is_their_number() -> None:
    assert label_of("gorgo_requests_total", "route", LABELS).at_most == str(len(INFERENCE_ROUTES))
