"""Tables of comparisons of variants: the task of a run, ratios by group, means of every variant, published rows.

Two kinds of comparison are printed. `routers` are learned routers: their ratios are baseline over variant, as their
papers print them. `cached` are sources of cached tokens: their ratios are variant over baseline.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from statistics import mean
from typing import Any

from experiments.comparison import MEASURES, ComparisonTarget, VariantComparison, rows_of
from experiments.fleets import ExperimentFleet
from experiments.grid import Grid, SystemReport
from experiments.pictures import Panel, Picture, Pictured, Point, pictures_of
from experiments.published import Claim, Published
from experiments.runner import Runner, Runs
from experiments.simulated import SimTask, TaskRun
from experiments.tables import TableSection, number, sections, with_interval
from experiments.traffic import PhasedTraffic, ReuseTraffic, Traffic
from experiments.variants import Variant, find_variant
from gorgo.lab.results import ResultRow
from gorgo.lab.sim.kv_events import CacheReports
from gorgo.lab.simulate.compare import mean_row

GORGO_MS, RESIDUAL, EVENTS = "gorgo-ms", "gorgo-residual", "gorgo-ms, events"
#: This project's policies; the first that a comparison has stands beside the published one.
OURS = (RESIDUAL, EVENTS, GORGO_MS)
MEAN, P99 = "mean TTFT", "p99 TTFT"
#: Lodestar's interval of scrapes, s.
USUAL_SCRAPES_S = 0.1
#: Share of the requests that are not measured: a learned router has its model by then.
LEARNED_WARM_UP, WARM_UP, PROBE_S = 0.5, 0.3, 10.0


def routers(
    group: str,
    fleet: str,
    traffic: PhasedTraffic | ReuseTraffic,
    against: str,
    variants: Sequence[str],
    stats: Sequence[str] = (),
    published: Mapping[tuple[str, str], Published] | None = None,
    *,
    also: Sequence[str] = (),
    scrape_s: float = USUAL_SCRAPES_S,
    cache_reports: CacheReports = "usage",
) -> VariantComparison:
    """Return variants against a baseline on one fleet and traffic.

    Parameters
    ----------
    stats:
        Keys of `MEASURES`; each is a row per variant.
    published:
        What was published, by variant and figure.
    also:
        Variants in the table of means alone.
    """
    scrapes = "" if scrape_s == USUAL_SCRAPES_S else f", scrapes each {scrape_s:g} s"
    reports = "" if cache_reports == "usage" else f", KV {cache_reports}"
    base = SimTask(
        variant=Variant(policy=GORGO_MS), fleet=ExperimentFleet(name=fleet), traffic=traffic, warm_up=LEARNED_WARM_UP,
        probe_s=PROBE_S, scrape_s=scrape_s, cache_reports=cache_reports,
    )  # fmt: skip
    return VariantComparison(
        group=group,
        title=f"{fleet}: {traffic.label}{scrapes}{reports}",
        base=base,
        variants=tuple(dict.fromkeys((against, *variants, *also))),
        targets=tuple(
            ComparisonTarget(of=one, against=against, figure=figure, published=(published or {}).get((one, figure)))
            for figure in stats
            for one in variants
        ),
        inverted=True,
        family=f"{group}-{fleet}",
        x=traffic.label,
    )


def cached(
    group: str, fleet: ExperimentFleet, traffic: Traffic, variants: Sequence[str], **more: Any
) -> VariantComparison:
    """Return variants on one fleet and traffic; `faults` and `audited` are of the task, the rest of the comparison."""
    task = {name: more.pop(name) for name in ("faults", "audited") if name in more}
    base = SimTask(variant=Variant(policy=GORGO_MS), fleet=fleet, traffic=traffic, warm_up=WARM_UP, **task)
    title = f"{fleet.title}: {traffic.label}"
    return VariantComparison(group=group, title=title, base=base, variants=tuple(variants), **{"family": group} | more)


# -- columns of the tables of means

#: Header of a column, and its cell from the mean of the rows and the runs of a variant.
Column = tuple[str, Callable[[ResultRow, Sequence[TaskRun]], str]]


def _figure(header: str, name: str, form: str, factor: float = 1) -> Column:
    return header, lambda row, _: number(MEASURES[name](row), form, factor)


def _values(runs: Sequence[TaskRun], name: str) -> list[float]:
    return [value for run in runs if (value := run.values.get(name)) is not None]


def _share(header: str, name: str) -> Column:
    return header, lambda _, runs: number(mean(run.values[name] or 0.0 for run in runs), ".2f", 100)


def _error(header: str, name: str) -> Column:
    """A model's error, %: the mean over runs of the mean or median over requests."""
    return header, lambda _, runs: f"{100 * mean(known):.1f}" if (known := _values(runs, name)) else "-"


def _failed(row: ResultRow, _: Sequence[TaskRun]) -> str:
    return str(row.errors)


def _mape(_: ResultRow, runs: Sequence[TaskRun]) -> str:
    return with_interval([100 * one for run in runs if (one := run.row.prediction_error_ratio) is not None], ".1f")


def _rho(_: ResultRow, runs: Sequence[TaskRun]) -> str:
    return with_interval(_values(runs, "rho"), ".3f")


def _bytes(_: ResultRow, runs: Sequence[TaskRun]) -> str:
    return f"{mean(sent):.0f}" if (sent := _values(runs, "bytes_per_request")) else "-"


def _pools(row: ResultRow, _: Sequence[TaskRun]) -> str:
    """Return the share of each pool of replicas, %."""
    shares: dict[str, float] = {}
    for name, share in row.share.items():
        pool = name.rpartition("-")[0]
        shares[pool] = shares.get(pool, 0.0) + share
    return "/".join(f"{pool} {100 * share:.0f}" for pool, share in shares.items())


def _fallbacks(_: ResultRow, runs: Sequence[TaskRun]) -> str:
    """Return the share of the decisions by each guard, % of all, the most common first."""
    counts: Counter[str] = Counter()
    for run in runs:
        counts.update(run.fallbacks)
    whole = counts.total() or 1
    return ", ".join(f"{word or 'policy'} {100 * count / whole:.1f}" for word, count in counts.most_common())


_TTFT_MS = [(f"{name} TTFT", ".0f") for name in ("mean", "p50", "p95", "p99")]
ROUTER_MEANS: Sequence[Column] = (
    *(_figure(header, *figure) for header, figure in zip(("TTFT mean ms", "p50", "p95", "p99"), _TTFT_MS, strict=True)),
    _figure("E2E p50 s", "p50 E2E", ".2f"), _figure("p95", "p95 E2E", ".2f"),
    _figure("TPOT p50 ms", "p50 TPOT", ".1f"), _figure("p99", "p99 TPOT", ".1f"),
    _figure("E2E/token ms", "mean E2E/token", ".1f"), _figure("tokens/s", "output tokens/s", ".0f"),
    _figure("hit %", "hit", ".1f", 100), ("MAPE %", _mape), ("failed", _failed), ("rho", _rho),
    ("shares of pools", _pools), ("decided by", _fallbacks),
    _error("model TTFT off %", "ttft_mean"), _error("median %", "ttft_median"),
    _error("model TPOT off %", "tpot_mean"), _error("TPOT median %", "tpot_median"),
)  # fmt: skip
SOURCE_MEANS: Sequence[Column] = (
    *(_figure(header, *figure)
      for header, figure in zip(("mean TTFT, ms", "p50", "p95", "p99"), _TTFT_MS, strict=True)),
    _figure("hit, %", "hit", ".1f", 100), _share("phantom, %", "phantom"), _share("missed, %", "missed"),
    ("bytes a request", _bytes), ("failed", _failed),
)  # fmt: skip


def _means(
    found: Sequence[VariantComparison], runs: Runs, seeds: Sequence[int], variant_is: str, columns: Sequence[Column]
) -> TableSection:
    """Return a row per comparison and variant that has runs."""
    rows = []
    for one in found:
        for variant in one.variants:
            if some := one.runs_of(variant, runs, seeds):
                row = mean_row(rows_of(some))
                rows.append((one.title, variant, str(len(some)), *(cell(row, some) for _, cell in columns)))
    return TableSection("Means over seeds", ("on", variant_is, "seeds", *(header for header, _ in columns)), rows)


# -- reports


def _run(found: Sequence[VariantComparison], grid: Grid, runner: Runner, title: str) -> Runs:
    return runner.runs(list(dict.fromkeys(task for one in found for task in one.tasks(grid.seeds))), title=title)


def router_report(
    found: Sequence[VariantComparison], grid: Grid, runner: Runner, pictured: Mapping[str, Pictured]
) -> SystemReport:
    """Run comparisons of routers and return ratios by group, then means of every variant."""
    found = [one.scaled(grid.scale) for one in found]
    runs = _run(found, grid, runner, "comparisons")
    verdicts = [verdict for one in found for verdict in one.verdicts(runs, grid.seeds, published=True)]
    claimed = [verdict for verdict in verdicts if verdict.met is not None]
    cpu_s = sum(run.cpu_s for run in runs.values())
    requests = mean(run.row.n for run in runs.values()) if runs else 0
    header = ("on", "of", "against", "figure", "published", "claim", "against / of [95 %]", "met")
    return SystemReport(
        sections=[*sections(verdicts, header), _means(found, runs, grid.seeds, "policy", ROUTER_MEANS)],
        end=(
            f"{sum(bool(one.met) for one in claimed)} of {len(claimed)} claims met, all simulated; {len(runs)} runs of "
            f"{requests:.0f} measured requests on average, {cpu_s:.0f} s of processor time."
        ),
        pictures=pictures_of(found, runs, grid.seeds, pictured) if grid.pictures else (),
        rows=[verdict.as_json() for verdict in verdicts],
    )


def source_report(
    found: Sequence[VariantComparison], grid: Grid, runner: Runner, pictured: Mapping[str, Pictured]
) -> SystemReport:
    """Run comparisons of sources; return targets by group, means, delays of evictions, and figures over time."""
    found, seeds = [one.scaled(grid.scale) for one in found], grid.seeds
    runs = _run(found, grid, runner, "sources of cached tokens")
    verdicts = [verdict for one in found for verdict in one.verdicts(runs, seeds)]
    header = ("on", "of", "against", "figure", "target", "of / against [95 %]", "met")
    tables = [*sections(verdicts, header), _means(found, runs, seeds, "with", SOURCE_MEANS)]
    if delays := [row for one in found for row in _delays(one, runs, seeds)]:
        columns = ("evictions on", "with", "region", "p50, ms", "p95, ms", "p99, ms")
        tables.append(TableSection("Delay of evictions", columns, delays))
    tables += [_times(one, runs, seeds) for one in found if one.base.audited]
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


def _times(one: VariantComparison, runs: Runs, seeds: Sequence[int]) -> TableSection:
    """Return a row per slice that every run has, and a column per variant, as means over seeds."""
    by_variant, rows = [one.runs_of(variant, runs, seeds) for variant in one.variants], []
    for slices in zip(*(run.slices for found in by_variant for run in found), strict=False):
        begins_s, cells, rest = slices[0]["begins_s"] or 0.0, [], iter(slices)
        for found in by_variant:
            parts = [next(rest) for _ in found]
            shares = (mean(part[name] or 0.0 for part in parts) for name in ("phantom", "missed", "hit"))
            cells.append(" / ".join(f"{100 * share:.1f}" for share in shares))
        rows.append((f"{begins_s:.0f}", one.marks.get(begins_s, ""), *cells))
    return TableSection(f"Phantom / missed / hit, %: {one.title}", ("from, s", "begins", *one.variants), rows)


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
            Point.of(name, values)
            for name, values in zip(("p50", "p95", "p99"), zip(*by_seed, strict=True), strict=True)
        ]
        for variant, region, by_seed in _delayed(one, runs, seeds)
    }
    if one.group == "sources" and curves:
        yield Panel("evictions known after, ms", one.title, "bars", curves)


def claims_of(system: str, found: Sequence[VariantComparison], grid: Grid, groups: Sequence[str]) -> list[Claim]:
    """Return the published figures of some groups, with this project's first policy of each comparison."""
    return [
        claim for one in found if one.group in groups for claim in _claims(system, one.scaled(grid.scale), grid.seeds)
    ]


def _claims(system: str, one: VariantComparison, seeds: Sequence[int]) -> Iterator[Claim]:
    ours = next((name for name in OURS if name in one.variants), None)
    bounds = {target.figure: target.at_least for target in one.targets if target.at_least is not None}
    for target in one.targets:
        if target.published is None:
            continue
        of = {target.of, target.against} | ({ours} if ours else set())
        sides = (target.against, target.of) if one.inverted else (target.of, target.against)
        yield Claim(
            system=system,
            on=f"{one.title}, {one.base.traffic.requests:,} requests",
            figure=f"{target.figure}, {' / '.join(sides)}",
            published=target.published,
            tasks=[one.task(variant, seed) for seed in seeds for variant in sorted(of)],
            reproduced=partial(one.ratio, target, target.of, seeds=seeds),
            ours=partial(one.ratio, target, ours, seeds=seeds) if ours else None,
            ours_name=ours or "",
            target=f">= {bounds[target.figure]:.2f}" if target.figure in bounds else "",
        )
