"""The data of the pictures: bars per traffic, curves over time, over tau and over the rate.

Owns which groups have which picture. Every point is a mean over seeds; its bar goes from the least seed to the most.
Drawing is `drawing`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import mean
from typing import Literal

from gorgo.apps.claims.target import MEASURES
from gorgo.apps.learned_routers.comparison import RouterComparison, Runs
from gorgo.apps.learned_routers.measure import RouterRun
from gorgo.apps.learned_routers.slices import TimeSlice
from gorgo.apps.results import ResultRow

Kind = Literal["bars", "lines"]
#: Groups with bars of mean and p99 TTFT per traffic.
BARS = ("lodestar", "lodestar-more", "lodestar-long", "motivation", "pools", "guards", "gates")
MEAN, P99 = "mean TTFT", "p99 TTFT"
#: A label of the sweep of tau.
TAU = "tau "
#: Groups of llm-d's scenarios at their rates.
LADDER = ("scenarios", "qps")


@dataclass(frozen=True, slots=True)
class PicturePoint:
    """A point: `x` is a name for bars. `low` and `high` are the least and the most of the seeds."""

    x: str | float
    value: float
    low: float
    high: float

    @classmethod
    def of(cls, x: str | float, values: Sequence[float]) -> PicturePoint:
        return cls(x, mean(values), min(values), max(values))


@dataclass(frozen=True, slots=True)
class PicturePanel:
    """Curves or bars by label, values that are drawn as dashed lines from side to side, and what begins at an x."""

    title: str
    x_label: str
    kind: Kind
    curves: dict[str, list[PicturePoint]]
    dashed: dict[str, float]
    marks: Mapping[float, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Picture:
    """Panels side by side; `name` is that of the file, without its extension."""

    name: str
    panels: list[PicturePanel]


def pictures(chosen: Sequence[RouterComparison], runs: Runs, seeds: Sequence[int]) -> list[Picture]:
    """Return the pictures of the comparisons that were run."""
    by_group: dict[str, list[RouterComparison]] = {}
    for one in chosen:
        by_group.setdefault(one.group, []).append(one)
    data = _Data(runs, seeds)
    found = []
    for group in BARS:
        found += [_bars(data, group, fleet, some) for fleet, some in _by_fleet(by_group.get(group, []))]
    found += [_replicas(data, one) for one in by_group.get("lodestar", [])]
    found += [_sweep(data, one) for one in by_group.get("tau", [])]
    found += [_learning(data, one) for one in by_group.get("shift", [])]
    found += [_rounds(data, by_group["pools"])] if "pools" in by_group else []
    found += [_sliding_ttft(data, one) for one in by_group.get("k-filter", [])]
    found += [_accuracy(data, one) for one in by_group.get("accuracy", [])]
    found += _ladders(data, [one for group in LADDER for one in by_group.get(group, [])])
    return found


class _Data:
    """Runs by comparison and variant."""

    def __init__(self, runs: Runs, seeds: Sequence[int]) -> None:
        self._runs, self._seeds = runs, seeds

    def runs_of(self, one: RouterComparison, variant: str) -> list[RouterRun]:
        tasks = [one.task(variant, seed) for seed in self._seeds]
        return [self._runs[task] for task in tasks if task in self._runs]

    def point(
        self, x: str | float, one: RouterComparison, variant: str, value: Callable[[ResultRow], float | None]
    ) -> Iterator[PicturePoint]:
        """Yield the point of one variant; none without a value."""
        known = [found for run in self.runs_of(one, variant) if (found := value(run.row)) is not None]
        if known:
            yield PicturePoint.of(x, known)

    def timeline(
        self, one: RouterComparison, variant: str, value: Callable[[TimeSlice], float | None]
    ) -> list[PicturePoint]:
        """Return a curve over the slices of a run, in minutes; slices without a value are left out."""
        found = []
        for slices in zip(*(run.slices for run in self.runs_of(one, variant)), strict=False):
            known = [shown for each in slices if (shown := value(each)) is not None]
            if known:
                found.append(PicturePoint.of(mean(each.begins_s for each in slices) / 60, known))
        return found


def variants_of(one: RouterComparison) -> list[str]:
    """Return the baseline and every variant once."""
    return list(dict.fromkeys((one.against, *one.variants, *one.also)))


def _by_fleet(some: Sequence[RouterComparison]) -> list[tuple[str, list[RouterComparison]]]:
    fleets = dict.fromkeys(one.fleet for one in some)
    return [(fleet, [one for one in some if one.fleet == fleet]) for fleet in fleets]


def _bars(data: _Data, group: str, fleet: str, some: Sequence[RouterComparison]) -> Picture:
    """Mean and p99 TTFT, a group of bars per traffic."""
    variants = dict.fromkeys(variant for one in some for variant in variants_of(one))
    panels = []
    for figure in (MEAN, P99):
        curves: dict[str, dict[str | float, PicturePoint]] = {variant: {} for variant in variants}
        for one in some:
            for variant in variants_of(one):
                for point in data.point(one.traffic.label, one, variant, MEASURES[figure]):
                    curves[variant][point.x] = point
        shown = {variant: list(points.values()) for variant, points in curves.items()}
        panels.append(PicturePanel(f"{figure}, ms", fleet, "bars", shown, {}))
    return Picture(f"{group}-{fleet}", panels)


def _replicas(data: _Data, one: RouterComparison) -> Picture:
    """Mean TTFT and requests of each replica."""
    ttft: dict[str, list[PicturePoint]] = {}
    counts: dict[str, list[PicturePoint]] = {}
    for variant in variants_of(one):
        found = data.runs_of(one, variant)
        for name in sorted({name for run in found for name in run.row.share}):
            times = [run.replica_ttft_ms[name] for run in found if name in run.replica_ttft_ms]
            requests = [run.row.share.get(name, 0.0) * run.row.n for run in found]
            counts.setdefault(variant, []).append(PicturePoint.of(name, requests))
            if times:
                ttft.setdefault(variant, []).append(PicturePoint.of(name, times))
    label = one.traffic.label
    panels = [
        PicturePanel("mean TTFT of each replica, ms", label, "bars", ttft, {}),
        PicturePanel("requests of each replica", label, "bars", counts, {}),
    ]
    return Picture(f"replicas-{one.fleet}", panels)


def _sweep(data: _Data, one: RouterComparison) -> Picture:
    """Mean TTFT over tau; what has no tau is a dashed line."""
    curve, dashed = [], {}
    for variant in variants_of(one):
        for point in data.point(0.0, one, variant, MEASURES[MEAN]):
            if variant.startswith(TAU):
                tau = float(variant.removeprefix(TAU))
                curve.append(PicturePoint(tau, point.value, point.low, point.high))
            else:
                dashed[variant] = point.value
    curve.sort(key=lambda point: float(point.x))
    panel = PicturePanel(f"mean TTFT, ms: {one.label}", "tau", "lines", {"prefix-threshold": curve}, dashed)
    return Picture(f"tau-{one.traffic.name}", [panel])


#: Title -> value of a slice, for the run with a shift.
_TIMELINES: dict[str, Callable[[TimeSlice], float | None]] = {
    "error of predicted TTFT, %": lambda one: None if one.error_ratio is None else 100 * one.error_ratio,
    "mean TTFT, ms": lambda one: one.ttft_ms_mean,
    "hit of the chosen replica, %": lambda one: None if one.hit is None else 100 * one.hit,
    "hit of the replica with most, %": lambda one: None if one.best_hit is None else 100 * one.best_hit,
}


def _learning(data: _Data, one: RouterComparison) -> Picture:
    panels = [_sliding(data, one, title, value) for title, value in _TIMELINES.items()]
    return Picture(f"shift-{one.fleet}", panels)


def _sliding_ttft(data: _Data, one: RouterComparison) -> Picture:
    return Picture(f"k-filter-{one.fleet}", [_sliding(data, one, MEAN + ", ms", lambda each: each.ttft_ms_mean)])


def _sliding(
    data: _Data, one: RouterComparison, title: str, value: Callable[[TimeSlice], float | None]
) -> PicturePanel:
    curves = {variant: points for variant in variants_of(one) if (points := data.timeline(one, variant, value))}
    return PicturePanel(title, f"{one.label}; minutes", "lines", curves, {})


def _rounds(data: _Data, some: Sequence[RouterComparison]) -> Picture:
    """Processor time of a round, over the samples that it trained on."""
    curves: dict[str, list[PicturePoint]] = {}
    for one in some:
        for variant in variants_of(one):
            rounds = sorted((each.samples, each.fit_cpu_s) for run in data.runs_of(one, variant) for each in run.fitted)
            curves[variant] = [PicturePoint(float(samples), cpu_s, cpu_s, cpu_s) for samples, cpu_s in rounds]
    panel = PicturePanel("processor time of a round, s", "samples", "lines", curves, {})
    return Picture("pools-rounds", [panel])


def _accuracy(data: _Data, one: RouterComparison) -> Picture:
    """Predicted and measured TTFT and time per token of each policy that learns."""
    panels = []
    for variant in variants_of(one):
        for time in ("ttft", "tpot"):
            curves = {
                name: data.timeline(one, variant, lambda each, field=f"{field}_{time}_ms": getattr(each, field))  # type: ignore[misc]
                for name, field in (("predicted", "predicted"), ("measured", "modelled"))
            }
            if curves["predicted"]:
                panels.append(PicturePanel(f"{variant}: mean {time.upper()}, ms", "minutes", "lines", curves, {}))
    return Picture(f"accuracy-{one.fleet}-{one.cache_reports}", panels)


def _ladders(data: _Data, some: Sequence[RouterComparison]) -> Iterator[Picture]:
    """Yield a picture per scenario: E2E per output token, and tokens a second, over the rate."""
    for name in dict.fromkeys(one.traffic.name for one in some):
        steps = [one for one in some if one.traffic.name == name]
        panels = []
        for title, value in (
            ("mean E2E per output token, ms", lambda row: row.e2e_per_token_ms.mean),
            ("output tokens/s", lambda row: row.tokens_per_s),
        ):
            curves: dict[str, list[PicturePoint]] = {}
            for one in sorted(steps, key=_rate):
                for variant in variants_of(one):
                    curves.setdefault(variant, []).extend(data.point(_rate(one), one, variant, value))
            panels.append(PicturePanel(title, f"{name}: requests/s", "lines", curves, {}))
        yield Picture(f"qps-{name}", panels)


def _rate(one: RouterComparison) -> float:
    return round(one.traffic.requests / sum(phase.duration_s for phase in one.traffic.phases), 3)
