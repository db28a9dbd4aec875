"""The sidecar's metrics for Prometheus, on a listener of its own.

Owns names, types, labels and help; the tables of the pages are tested against `METRICS` and `LABELS`. Labels are
bounded: weights by the policy, others by short lists in the code.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from math import nan

from prometheus_client import CollectorRegistry, Counter, Gauge, disable_created_metrics, start_http_server

from gorgo.core.metric_spec import LabelSpec, MetricSpec, label_of
from tuner.campaign.generation import Generation
from tuner.sidecar.group import ProxyGroup
from tuner.sidecar.progress import Progress

METRICS: tuple[MetricSpec, ...] = (
    MetricSpec("gorgo_tuner_generation", "gauge", (), "Number of the newest generation."),
    MetricSpec("gorgo_tuner_generations_total", "counter", ("outcome",), "Generations, `accepted` or `rejected`."),
    MetricSpec("gorgo_tuner_rollbacks_total", "counter", (), "Immediate roll-backs of weights."),
    MetricSpec("gorgo_tuner_objective_seconds", "gauge", ("arm",), "p95 TTFT of the last generation's two arms."),
    MetricSpec("gorgo_tuner_window_ttft_seconds", "gauge", (), "p95 TTFT of the newest window; NaN without one."),
    MetricSpec("gorgo_tuner_sigma", "gauge", (), "Step size in log space."),
    MetricSpec("gorgo_tuner_weight", "gauge", ("weight", "set"), "Weights `in_force`, and those of the `incumbent`."),
    MetricSpec("gorgo_tuner_comparing", "gauge", (), "1 while two weight sets are compared."),
    MetricSpec("gorgo_tuner_paused", "gauge", (), "1 while the campaign is paused."),
    MetricSpec("gorgo_tuner_polls_total", "counter", ("result",), "Polls of the proxy, `ok` or `failed`."),
    MetricSpec("gorgo_tuner_samples_total", "counter", (), "Samples read."),
    MetricSpec("gorgo_tuner_lost_samples_total", "counter", (), "Lost or unreadable samples."),
    MetricSpec("gorgo_tuner_proxy_restarts_total", "counter", (), "Detected restarts of the proxy."),
    MetricSpec("gorgo_tuner_history_waiting_rows", "gauge", (), "Rows queued for the database."),
    MetricSpec("gorgo_tuner_leader", "gauge", (), "1 while this process tunes, 0 while it is a standby."),
    MetricSpec("gorgo_tuner_proxies", "gauge", ("state",), "Proxies of a group by state."),
    MetricSpec("gorgo_tuner_weights_version", "gauge", ("proxy",), "Version of the weights at each proxy of a group."),
    MetricSpec("gorgo_tuner_out_of_step_total", "counter", (), "Times that proxies of a group had other weights."),
)

LABELS: tuple[LabelSpec, ...] = (
    LabelSpec("outcome", (), "of a generation", ("accepted", "rejected")),
    LabelSpec("arm", (), "of a comparison", ("offspring", "incumbent")),
    LabelSpec("weight", (), "of the tuned policy", bound="its weights"),
    LabelSpec("set", (), "of weights", ("in_force", "incumbent")),
    LabelSpec("result", (), "of a poll", ("ok", "failed")),
    LabelSpec("state", (), "of a proxy of a group", ("in_step", "out_of_step", "unreachable")),
    LabelSpec("proxy", (), "by its admin address", bound="the options `--url`"),
)


class TunerMetrics:
    """The metrics of one sidecar."""

    def __init__(self) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # untyped library
        self.registry = CollectorRegistry()
        self._all = {spec.name: _made(spec, self.registry) for spec in METRICS}
        for spec in METRICS:
            if spec.kind == "counter" and len(spec.labels) == 1:
                for value in label_of(spec.name, *spec.labels, labels=LABELS).values:
                    # Exported from the start: a counter that appears with its first event has no rate for it.
                    self._all[spec.name].labels(value)

    def count(self, name: str, *labels: str, by: int = 1) -> None:
        metric = self._all[name]
        assert isinstance(metric, Counter), name
        (metric.labels(*labels) if labels else metric).inc(by)

    def generation(self, row: Generation) -> None:
        self.count("gorgo_tuner_generations_total", "accepted" if row.accepted else "rejected")
        for arm, value in (("offspring", row.objective_ms), ("incumbent", row.incumbent_objective_ms)):
            if value is not None:
                self._set("gorgo_tuner_objective_seconds", value / 1e3, arm)
        if row.sigma is not None:
            self._set("gorgo_tuner_sigma", row.sigma)

    def progress(self, progress: Progress, *, waiting: int) -> None:
        for kind, weights in (("in_force", progress.weights or {}), ("incumbent", progress.incumbent)):
            for name, value in weights.items():
                self._set("gorgo_tuner_weight", value, name, kind)
        ttft_ms = progress.ttft_ms_p95
        self._set("gorgo_tuner_generation", progress.generation)
        self._set("gorgo_tuner_window_ttft_seconds", nan if ttft_ms is None else ttft_ms / 1e3)
        self._set("gorgo_tuner_comparing", float(progress.phase == "comparing"))
        self._set("gorgo_tuner_paused", float(progress.phase == "frozen"))
        self._set("gorgo_tuner_history_waiting_rows", waiting)

    def leader(self, leads: bool) -> None:
        self._set("gorgo_tuner_leader", float(leads))

    def group(self, group: ProxyGroup) -> None:
        """Export the state of each proxy."""
        unreachable, behind = set(group.unreachable), set(group.agreement.out_of_step())
        counts = {"unreachable": len(unreachable), "out_of_step": len(behind - unreachable)}
        counts["in_step"] = len(group.agreement.names) - sum(counts.values())
        for state, count in counts.items():
            self._set("gorgo_tuner_proxies", count, state)
        for name in group.agreement.names:
            found = group.agreement.reported(name)
            self._set("gorgo_tuner_weights_version", nan if found is None else found.version, name)

    def _set(self, name: str, value: float, *labels: str) -> None:
        metric = self._all[name]
        assert isinstance(metric, Gauge), name
        (metric.labels(*labels) if labels else metric).set(value)


def _made(spec: MetricSpec, registry: CollectorRegistry) -> Counter | Gauge:
    kind = Counter if spec.kind == "counter" else Gauge
    return kind(spec.name, spec.description, spec.labels, registry=registry)


@contextmanager
def listening(metrics: TunerMetrics, bind: tuple[str, int] | None) -> Iterator[int | None]:
    """Serve `GET /metrics` and yield the port; None without an address. Raises `OSError` for one in use."""
    if bind is None:
        yield None
        return
    host, port = bind
    server, thread = start_http_server(port, addr=host, registry=metrics.registry)
    try:
        yield int(server.server_port)
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
