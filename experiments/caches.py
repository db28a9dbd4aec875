"""What the comparisons of cache maps share: the task of a run and the tables of targets, means, delays and slices."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import mean
from typing import Any

from experiments.comparison import MEASURES, VariantComparison, rows_of
from experiments.fleets import ExperimentFleet
from experiments.grid import Grid, SystemReport
from experiments.pictures import Panel, Picture, Pictured, Point, pictures_of
from experiments.runner import Runner, Runs
from experiments.simulated import SimTask, TaskRun
from experiments.tables import TableSection, number, sections
from experiments.traffic import Traffic
from experiments.variants import Variant, find_variant
from gorgo.lab.simulate.compare import mean_row

#: Share of the requests that are not measured.
WARM_UP = 0.3
TARGETS_HEADER = ("on", "of", "against", "figure", "target", "of / against [95 %]", "met")
MEANS_HEADER = (
    "on", "with", "seeds", "mean TTFT, ms", "p50", "p95", "p99", "hit, %", "phantom, %", "missed, %",
    "bytes a request", "failed",
)  # fmt: skip
#: Behind these a column for each variant: phantom, missed and found tokens, %.
TIMES_HEADER = ("from, s", "begins")
DELAYS_HEADER = ("evictions on", "with", "region", "p50, ms", "p95, ms", "p99, ms")
_QUANTILES = ("p50", "p95", "p99")


def cached(
    group: str, fleet: ExperimentFleet, traffic: Traffic, variants: Sequence[str], **more: Any
) -> VariantComparison:
    """Return variants on one fleet and traffic; `faults` and `audited` are of the task, the rest of the comparison."""
    task = {name: more.pop(name) for name in ("faults", "audited") if name in more}
    base = SimTask(variant=Variant(policy="gorgo-ms"), fleet=fleet, traffic=traffic, warm_up=WARM_UP, **task)
    more = {"family": group} | more
    return VariantComparison(
        group=group, title=f"{fleet.title}: {traffic.label}", base=base, variants=tuple(variants), **more
    )


def report_of(
    found: Sequence[VariantComparison], grid: Grid, runner: Runner, pictured: Mapping[str, Pictured]
) -> SystemReport:
    """Run comparisons and return targets by group, means, delays of evictions, and figures over time."""
    found, seeds = [one.scaled(grid.scale) for one in found], grid.seeds
    tasks = list(dict.fromkeys(task for one in found for task in one.tasks(seeds)))
    runs = runner.runs(tasks, title="sources of cached tokens")
    verdicts = [verdict for one in found for verdict in one.verdicts(runs, seeds)]
    means = [row for one in found for row in _means(one, runs, seeds)]
    tables = [*sections(verdicts, TARGETS_HEADER), TableSection("Means over seeds", MEANS_HEADER, means)]
    if delays := [row for one in found for row in _delays(one, runs, seeds)]:
        tables.append(TableSection("Delay of evictions", DELAYS_HEADER, delays))
    for one in found:
        if one.base.audited:
            title, header = f"Phantom / missed / hit, %: {one.title}", (*TIMES_HEADER, *one.variants)
            tables.append(TableSection(title, header, list(_times(one, runs, seeds))))
    pictures: list[Picture] = []
    if grid.pictures:
        pictures = pictures_of(found, runs, seeds, pictured)
        if panels := [panel for one in found for panel in _delay_panel(one, runs, seeds)]:
            pictures.append(Picture("delays", panels))
    return SystemReport(
        sections=tables,
        end=f"All simulated; {len(runs)} runs, {sum(run.cpu_s for run in runs.values()):.0f} s of processor time.",
        pictures=pictures,
        rows=[verdict.as_json() for verdict in verdicts],
    )


def _means(one: VariantComparison, runs: Runs, seeds: Sequence[int]) -> Iterator[tuple[str, ...]]:
    for variant in one.variants:
        found = one.runs_of(variant, runs, seeds)
        row = mean_row(rows_of(found))
        sent = [value for run in found if (value := run.values.get("bytes_per_request")) is not None]
        yield (
            one.title,
            variant,
            str(len(found)),
            *(number(MEASURES[f"{part} TTFT"](row), ".0f") for part in ("mean", "p50", "p95", "p99")),
            number(row.cache_hit, ".1f", 100),
            *(number(mean(run.values[name] or 0.0 for run in found), ".2f", 100) for name in ("phantom", "missed")),
            f"{mean(sent):.0f}" if sent else "-",
            str(row.errors),
        )


def _times(one: VariantComparison, runs: Runs, seeds: Sequence[int]) -> Iterator[tuple[str, ...]]:
    """Yield a row per slice that every run has, as means over seeds."""
    by_variant = [one.runs_of(variant, runs, seeds) for variant in one.variants]
    for slices in zip(*(run.slices for found in by_variant for run in found), strict=False):
        begins_s, cells, rest = slices[0]["begins_s"] or 0.0, [], iter(slices)
        for found in by_variant:
            parts = [next(rest) for _ in found]
            shares = (mean(part[name] or 0.0 for part in parts) for name in ("phantom", "missed", "hit"))
            cells.append(" / ".join(f"{100 * share:.1f}" for share in shares))
        yield f"{begins_s:.0f}", one.marks.get(begins_s, ""), *cells


def _delayed(
    one: VariantComparison, runs: Runs, seeds: Sequence[int]
) -> Iterator[tuple[str, str, list[Sequence[float]]]]:
    """Yield variant, region and the quantiles of each seed, ms, of what is reported after a delay."""
    for variant in one.variants:
        if find_variant(variant).source in ("push", "events") and not one.base.audited:
            found: list[TaskRun] = one.runs_of(variant, runs, seeds)
            for name in dict.fromkeys(name for run in found for name in run.lists if name.startswith("delay ")):
                yield variant, name.removeprefix("delay "), [run.lists[name] for run in found if name in run.lists]


def _delays(one: VariantComparison, runs: Runs, seeds: Sequence[int]) -> Iterator[tuple[str, ...]]:
    for variant, region, by_seed in _delayed(one, runs, seeds):
        yield one.title, variant, region, *(f"{mean(values):.1f}" for values in zip(*by_seed, strict=True))


def _delay_panel(one: VariantComparison, runs: Runs, seeds: Sequence[int]) -> Iterator[Panel]:
    """Yield a panel of the quantiles of the time until an eviction is known, of sources side by side."""
    curves = {
        f"{variant}, {region}": [
            Point.of(name, values) for name, values in zip(_QUANTILES, zip(*by_seed, strict=True), strict=True)
        ]
        for variant, region, by_seed in _delayed(one, runs, seeds)
    }
    if one.group == "sources" and curves:
        yield Panel("evictions known after, ms", one.title, "bars", curves)
