"""The metrics of all workers of a router as those of one.

Owns what becomes of each metric (`merged`). Counters and histograms are added up. Of gauges some are added up, of some
the worst counts, and the others, which are the same everywhere or learned by each worker, are the leader's. What is
true of a process alone has its number as the label `worker`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

#: Gauges of what each worker has its own part of.
ADDED = frozenset(
    (
        *("gorgo_in_flight_requests", "gorgo_in_flight_tokens", "gorgo_queued_prefill_tokens"),
        *("gorgo_queued_prefill_seconds", "gorgo_queue_requests", "gorgo_buffered_bytes"),
    )
)
#: Gauges of which the greatest counts, and the least.
GREATEST = frozenset(("gorgo_saturation_ratio", "gorgo_config_reload_failed", "gorgo_replicas_wanted"))
LEAST = frozenset(("gorgo_ready", "gorgo_replica_eligible"))
#: Counters of events that reach every worker: each has counted them all.
OF_ALL = frozenset(("gorgo_replica_restarts", "gorgo_config_reloads"))
#: Of prometheus_client's process metrics.
PROCESS = "gorgo_process_"

Labels = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Family:
    """One metric of one worker: its samples by name and labels."""

    name: str
    kind: str
    description: str
    samples: Mapping[tuple[str, Labels], float]


def families_of(registry: CollectorRegistry) -> list[Family]:
    """Return the metrics of this process."""
    found = []
    for metric in registry.collect():
        samples = {(each.name, tuple(each.labels.items())): float(each.value) for each in metric.samples}
        found.append(Family(metric.name, metric.type, metric.documentation, samples))
    return found


def merged(leader: int, by_worker: Mapping[int, Sequence[Family]]) -> list[Family]:
    """Return the metrics of all workers as those of one.

    >>> one = Family("gorgo_requests", "counter", "", {("gorgo_requests_total", ()): 2.0})
    >>> two = Family("gorgo_requests", "counter", "", {("gorgo_requests_total", ()): 3.0})
    >>> merged(0, {0: [one], 1: [two]})[0].samples
    {('gorgo_requests_total', ()): 5.0}
    """
    first = leader if leader in by_worker else min(by_worker)
    order = [first, *sorted(by_worker.keys() - {first})]
    found: dict[str, tuple[Family, dict[tuple[str, Labels], float]]] = {}
    for worker in order:
        for family in by_worker[worker]:
            _, samples = found.setdefault(family.name, (family, {}))
            _add(samples, family, worker, is_first=worker == first)
    return [Family(family.name, family.kind, family.description, samples) for family, samples in found.values()]


def _add(samples: dict[tuple[str, Labels], float], family: Family, worker: int, *, is_first: bool) -> None:
    name = family.name
    if name.startswith(PROCESS):
        for (sample, labels), value in family.samples.items():
            samples[sample, (*labels, ("worker", str(worker)))] = value
        return
    sums = name in ADDED or (family.kind != "gauge" and name not in OF_ALL)
    for key, value in family.samples.items():
        before = samples.get(key)
        if before is None and (is_first or sums or name in GREATEST):
            samples[key] = value
        elif before is not None and sums:
            samples[key] = before + value
        elif before is not None and name in GREATEST:
            samples[key] = max(before, value)
        elif before is not None and name in LEAST:
            samples[key] = min(before, value)


def exposition(families: Iterable[Family]) -> bytes:
    """Return the text of `/metrics`."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collected(families))
    return generate_latest(registry)


class _Collected(Collector):
    def __init__(self, families: Iterable[Family]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        for family in self._families:
            metric = Metric(family.name, family.description, family.kind)
            for (name, labels), value in family.samples.items():
                metric.add_sample(name, dict(labels), value)
            yield metric
