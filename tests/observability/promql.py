"""PromQL read simply: which series a query names, by which labels it selects, groups and matches."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from gorgo.core.metric_spec import MetricSpec
from gorgo.live.telemetry.metric_table import METRICS
from tuner.sidecar.metrics import METRICS as TUNER_METRICS

FOLDER = Path(__file__).parents[2] / "terraform/modules/observability"
#: Stands for Grafana's own interval, which Prometheus does not know.
INTERVAL = "$__rate_interval"

_SELECTOR = re.compile(r"\b(gorgo_\w+)(?:\{([^}]*)\})?")
#: An aggregation and the first series within it.
_GROUPED = re.compile(r"by \(([^)]*)\) \((?:\w+\()*(gorgo_\w+)")


@dataclass(frozen=True, slots=True)
class Target:
    """One query of a panel, or of an alert, and the legend that it is drawn with."""

    title: str
    expr: str
    legend: str = ""

    @property
    def names(self) -> set[str]:
        return {name for name, _ in _SELECTOR.findall(self.expr)}

    def labels_used(self) -> Iterator[tuple[str, str, str | None]]:
        """Series, label, and the value where it is selected by one."""
        for name, selector in _SELECTOR.findall(self.expr):
            for label, operator, value in re.findall(r'(\w+)\s*(=~|!~|!=|=)\s*"([^"]*)"', selector):
                for one in value.split("|") if "~" in operator else [value]:
                    yield name, label, one
        for group, name in _GROUPED.findall(self.expr):
            for label in filter(None, (label.strip() for label in group.split(","))):
                yield name, label, None


def dashboard() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((FOLDER / "gorgo-dashboard.json").read_text())
    return found


def panels() -> list[dict[str, Any]]:
    """Those that draw something."""
    return [panel for panel in dashboard()["panels"] if panel["type"] != "row"]


def dashboard_targets() -> list[Target]:
    return [
        Target(panel["title"], target["expr"], target["legendFormat"])
        for panel in panels()
        for target in panel["targets"]
    ]


def alerts() -> list[dict[str, Any]]:
    (group,) = yaml.safe_load((FOLDER / "gorgo-rules.yml").read_text())["groups"]
    found: list[dict[str, Any]] = group["rules"]
    return found


def alert_targets() -> list[Target]:
    return [Target(rule["alert"], rule["expr"]) for rule in alerts()]


def series_labels(metrics: Sequence[MetricSpec] = (*METRICS, *TUNER_METRICS)) -> dict[str, set[str]]:
    """Labels by the name of a series."""
    found: dict[str, set[str]] = {}
    for metric in metrics:
        if metric.kind == "histogram":
            found |= {f"{metric.name}{end}": set(metric.labels) for end in ("_sum", "_count")}
            found[f"{metric.name}_bucket"] = {*metric.labels, "le"}
        else:
            found[metric.name] = set(metric.labels)
    return found
