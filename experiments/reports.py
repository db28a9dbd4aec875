"""What a system runs and prints: the grid, tables of targets and of variants, pictures, and published rows.

Targets are of whole windows. Variants are of two kinds. `routers` are learned routers: their ratios are baseline over
variant, as their papers print them. `cached` are sources of cached tokens: their ratios are variant over baseline.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from statistics import fmean, mean
from time import monotonic
from typing import Any, TypeAlias, cast

from experiments.comparison import MEASURES, ComparisonTarget, VariantComparison, value_of
from experiments.fleets import ExperimentFleet
from experiments.pictures import Panel, Picture, Pictured, Point, pictures_of
from experiments.published import Claim, Published
from experiments.runner import Runner, Runs
from experiments.simulated import SimTask, TaskRun
from experiments.tables import TableSection, number, sections, with_interval
from experiments.traffic import PhasedTraffic, ReuseTraffic, Traffic
from experiments.variants import Variant, find_variant
from experiments.windows import PolicyTask, Queue, RatioTarget, Workload
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
#: Columns behind a target's labels, and behind those of a variant of the two kinds.
HEADER = ("on", "of", "against", "figure", "target", "of / against [95 %]", "met")
ROUTERS_HEADER = ("on", "of", "against", "figure", "published", "claim", "against / of [95 %]", "met")
#: Header, measure, form and factor of a column of means over seeds.
FigureColumn: TypeAlias = tuple[str, str, str, float]
#: What makes a cell of its own from the mean of the rows and the runs of a variant; and a column that may be one.
Special: TypeAlias = Callable[[ResultRow, Sequence[TaskRun]], str]
Column: TypeAlias = tuple[str, str | Special, str, float]
MEANS: Sequence[FigureColumn] = (
    ("TTFT p50 ms", "p50 TTFT", ".0f", 1), ("p95", "p95 TTFT", ".0f", 1), ("E2E p50 s", "p50 E2E", ".2f", 1),
    ("p95", "p95 E2E", ".2f", 1), ("hit %", "hit", ".1f", 100),
)  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """The part of the grid that is run."""

    seeds: Sequence[int]  #: Each run with each seed.
    scale: float = 1.0  #: Multiple of the requests of each run.
    trace: str | None = None  #: File of Mooncake's conversation trace; None: rows of it are left out.
    counts: Sequence[int] = (2, 4, 8)  #: Numbers of routers.
    first_requests: int | None = None  #: Of whole windows only so many; None: all.
    pictures: bool = False  #: Whether pictures are made.
    queue: Queue | None = None  #: Of the proxy under every policy or under none; None: as each row has it.

    def cut(self, workload: Workload) -> Workload:
        """Return the workload with as many requests and the queue that the grid has."""
        return replace(workload.first(self.first_requests), queue=self.queue or workload.queue)


@dataclass(frozen=True, slots=True, kw_only=True)
class SystemReport:
    """Tables of a system, their last line, the pictures, and the rows for `--json`."""

    sections: Sequence[TableSection]
    end: str
    pictures: Sequence[Picture] = ()
    rows: Any = field(default_factory=list)


# -- targets on whole windows


def target_report(
    targets: Iterable[RatioTarget], groups: Sequence[str], grid: Grid, runner: Runner, titles: Mapping[str, str],
    means: Sequence[FigureColumn] = MEANS,
) -> SystemReport:  # fmt: skip
    """Run what the targets of the groups need, and return them by group, then means of every policy."""
    begun_s, made, seeds = monotonic(), runner.made, grid.seeds
    chosen = [one.on(grid.cut) for one in targets if one.group in groups]
    tasks = list(dict.fromkeys(task for target in chosen for task in target.tasks(seeds)))
    # Runs that share a trace follow one another: each process keeps the feed that it used last.
    ordered = sorted(tasks, key=lambda one: (one.trace, one.seed, one.workload.time_scale))
    runs = runner.runs(ordered, title="this project's claims about its policies")
    verdicts = [target.verdict(runs, seeds) for target in chosen]
    unique = {task.key(): runs[task] for task in tasks}
    failing = sorted({task.policy for task in tasks if runs[task].row.errors})
    met, cpu_s = sum(bool(one.met) for one in verdicts), sum(run.cpu_s for run in unique.values())
    end = (
        f"{met} of {len(verdicts)} targets met, all simulated; {len(unique)} runs, {cpu_s:.0f} s of processor time; "
        f"{runner.made - made} of them were made now, in {monotonic() - begun_s:.0f} s."
    )
    header = ("on", "policy", *(name for name, *_ in means))
    return SystemReport(
        sections=[*sections(verdicts, HEADER, titles), TableSection("", header, mean_cells(tasks, runs, means))],
        end=end + (f" Requests failed under {', '.join(failing)}." if failing else ""),
        rows=[verdict.as_json() for verdict in verdicts],
    )


def mean_cells(
    tasks: Sequence[PolicyTask], runs: Runs, columns: Sequence[FigureColumn] = MEANS
) -> list[tuple[str, ...]]:
    """Return means over seeds of every policy, workload by workload."""
    by_workload: dict[tuple[Workload, str], list[ResultRow]] = {}
    for task in tasks:
        by_workload.setdefault((task.workload, task.policy), []).append(runs[task].row)
    rows = {(workload.label, policy): found for (workload, policy), found in by_workload.items()}
    labels = list(dict.fromkeys(label for label, _ in rows))
    ordered = sorted(rows, key=lambda place: (labels.index(place[0]), place[1]))
    return [
        (*place, *(number(_seed_mean(rows[place], name), form, factor) for _, name, form, factor in columns))
        for place in ordered
    ]


def _seed_mean(rows: Sequence[ResultRow], measure: str) -> float | None:
    """Return the mean of each seed's figure; the replica with the largest share is another one in each."""
    values = [value for row in rows if (value := MEASURES[measure](row)) is not None]
    return fmean(values) if values else None


# -- the two kinds of comparison of variants


def routers(
    group: str, fleet: str, traffic: PhasedTraffic | ReuseTraffic, against: str, variants: Sequence[str],
    stats: Sequence[str] = (), published: Mapping[tuple[str, str], Published] | None = None, *,
    also: Sequence[str] = (), scrape_s: float = USUAL_SCRAPES_S, cache_reports: CacheReports = "usage",
) -> VariantComparison:  # fmt: skip
    """Return variants against a baseline on one fleet and traffic.

    Each of the `stats` (keys of `MEASURES`) is a row per variant, `published` what was printed by variant and figure,
    and `also` variants in the table of means alone.
    """
    scrapes = "" if scrape_s == USUAL_SCRAPES_S else f", scrapes each {scrape_s:g} s"
    reports = "" if cache_reports == "usage" else f", KV {cache_reports}"
    base = SimTask(
        variant=Variant(policy=GORGO_MS), fleet=ExperimentFleet(name=fleet), traffic=traffic, warm_up=LEARNED_WARM_UP,
        probe_s=PROBE_S, scrape_s=scrape_s, cache_reports=cache_reports,
    )  # fmt: skip
    targets = [
        ComparisonTarget(of=one, against=against, figure=figure, published=(published or {}).get((one, figure)))
        for figure in stats
        for one in variants
    ]
    return VariantComparison(
        group=group, title=f"{fleet}: {traffic.label}{scrapes}{reports}", base=base, targets=targets, inverted=True,
        variants=tuple(dict.fromkeys((against, *variants, *also))), family=f"{group}-{fleet}", x=traffic.label,
    )  # fmt: skip


def cached(
    group: str, fleet: ExperimentFleet, traffic: Traffic, variants: Sequence[str], **more: Any
) -> VariantComparison:
    """Return variants on one fleet and traffic; `faults` and `audited` are of the task, the rest of the comparison."""
    task = {name: more.pop(name) for name in ("faults", "audited") if name in more}
    base = SimTask(variant=Variant(policy=GORGO_MS), fleet=fleet, traffic=traffic, warm_up=WARM_UP, **task)
    title = f"{fleet.title}: {traffic.label}"
    return VariantComparison(group=group, title=title, base=base, variants=tuple(variants), **{"family": group} | more)


# -- columns of their tables of means


def _cell(figure: str | Special, form: str, factor: float, row: ResultRow, runs: Sequence[TaskRun]) -> str:
    """Return a cell of a variant from the mean of its rows, or from the mean of its runs' values."""
    if not isinstance(figure, str):
        return figure(row, runs)
    if figure in MEASURES:
        return number(MEASURES[figure](row), form, factor)
    values = [value for run in runs if (value := run.values.get(figure)) is not None]
    return number(mean(values) if values else None, form, factor)


def _with_interval(figure: str, form: str, factor: float = 1) -> Special:
    def cell(_: ResultRow, runs: Sequence[TaskRun]) -> str:
        return with_interval([factor * value for run in runs if (value := value_of(run, figure)) is not None], form)

    return cell


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


_FAILED: Column = ("failed", lambda row, _: str(row.errors), "", 1)
#: The errors of models are means over runs of the mean or median over requests.
ROUTER_MEANS: Sequence[Column] = (
    ("TTFT mean ms", "mean TTFT", ".0f", 1), ("p50", "p50 TTFT", ".0f", 1), ("p95", "p95 TTFT", ".0f", 1),
    ("p99", "p99 TTFT", ".0f", 1), ("E2E p50 s", "p50 E2E", ".2f", 1), ("p95", "p95 E2E", ".2f", 1),
    ("TPOT p50 ms", "p50 TPOT", ".1f", 1), ("p99", "p99 TPOT", ".1f", 1), ("E2E/token ms", "mean E2E/token", ".1f", 1),
    ("tokens/s", "output tokens/s", ".0f", 1), ("hit %", "hit", ".1f", 100),
    ("MAPE %", _with_interval("MAPE", ".1f", 100), "", 1), _FAILED, ("rho", _with_interval("rho", ".3f"), "", 1),
    ("shares of pools", _pools, "", 1), ("decided by", _fallbacks, "", 1),
    ("model TTFT off %", "ttft_mean", ".1f", 100), ("median %", "ttft_median", ".1f", 100),
    ("model TPOT off %", "tpot_mean", ".1f", 100), ("TPOT median %", "tpot_median", ".1f", 100),
)  # fmt: skip
SOURCE_MEANS: Sequence[Column] = (
    ("mean TTFT, ms", "mean TTFT", ".0f", 1), ("p50", "p50 TTFT", ".0f", 1), ("p95", "p95 TTFT", ".0f", 1),
    ("p99", "p99 TTFT", ".0f", 1), ("hit, %", "hit", ".1f", 100), ("phantom, %", "phantom", ".2f", 100),
    ("missed, %", "missed", ".2f", 100), ("bytes a request", "bytes_per_request", ".0f", 1), _FAILED,
)  # fmt: skip


# -- their report


def variant_report(
    found: Iterable[VariantComparison], groups: Sequence[str], grid: Grid, runner: Runner,
    pictured: Mapping[str, Pictured],
) -> SystemReport:  # fmt: skip
    """Run comparisons of one kind; return ratios by group, means, delays of evictions, and figures over time."""
    chosen, seeds = [one.scaled(grid.scale) for one in found if one.group in groups], grid.seeds
    title = "comparisons" if chosen[0].inverted else "sources of cached tokens"
    runs = runner.runs(list(dict.fromkeys(task for one in chosen for task in one.tasks(seeds))), title=title)
    verdicts = [verdict for one in chosen for verdict in one.verdicts(runs, seeds)]
    cpu_s = sum(run.cpu_s for run in runs.values())
    if chosen[0].inverted:
        claimed = [verdict for verdict in verdicts if verdict.met is not None]
        end = (
            f"{sum(bool(one.met) for one in claimed)} of {len(claimed)} claims met, all simulated; {len(runs)} runs of "
            f"{mean(run.row.n for run in runs.values()):.0f} measured requests on average, "
        )
        tables = [*sections(verdicts, ROUTERS_HEADER), _means(chosen, runs, seeds, "policy", ROUTER_MEANS)]
    else:
        end = f"All simulated; {len(runs)} runs, "
        tables = [*sections(verdicts, HEADER), _means(chosen, runs, seeds, "with", SOURCE_MEANS)]
    delays = [(one.title, *row) for one in chosen for row in _delayed(one, runs, seeds)]
    if delays:
        columns = ("evictions on", "with", "region", "p50, ms", "p95, ms", "p99, ms")
        rows = [(*labels, *(f"{mean(values):.1f}" for values in parts)) for *labels, parts in delays]
        tables.append(TableSection("Delay of evictions", columns, rows))
    tables += [_times(one, runs, seeds) for one in chosen if one.base.audited]
    pictures = pictures_of(chosen, runs, seeds, pictured) if grid.pictures else []
    if grid.pictures and (panels := [panel for one in chosen for panel in _delay_panel(one, runs, seeds)]):
        pictures.append(Picture("delays", panels))
    return SystemReport(
        sections=tables, end=f"{end}{cpu_s:.0f} s of processor time.", pictures=pictures,
        rows=[verdict.as_json() for verdict in verdicts],
    )  # fmt: skip


def _means(
    found: Sequence[VariantComparison], runs: Runs, seeds: Sequence[int], variant_is: str, columns: Sequence[Column]
) -> TableSection:
    """Return a row per comparison and variant that has runs."""
    rows = []
    for one in found:
        for variant in one.variants:
            if some := one.runs_of(variant, runs, seeds):
                row = mean_row([run.row for run in some])
                cells = (_cell(figure, form, factor, row, some) for _, figure, form, factor in columns)
                rows.append((one.title, variant, str(len(some)), *cells))
    return TableSection("Means over seeds", ("on", variant_is, "seeds", *(header for header, *_ in columns)), rows)


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
) -> Iterator[tuple[str, str, list[tuple[float, ...]]]]:
    """Yield variant, region and the seeds' p50, p95 and p99 of what is reported after a delay, ms."""
    for variant in one.variants:
        if find_variant(variant).source in ("push", "events") and not one.base.audited:
            found: list[TaskRun] = one.runs_of(variant, runs, seeds)
            for name in dict.fromkeys(name for run in found for name in run.lists if name.startswith("delay ")):
                by_seed = [run.lists[name] for run in found if name in run.lists]
                yield variant, name.removeprefix("delay "), list(zip(*by_seed, strict=True))


def _delay_panel(one: VariantComparison, runs: Runs, seeds: Sequence[int]) -> Iterator[Panel]:
    """Yield a panel of the quantiles of the time until an eviction is known, of sources side by side."""
    curves = {
        f"{variant}, {region}": [Point.of(*point) for point in zip(("p50", "p95", "p99"), parts, strict=True)]
        for variant, region, parts in _delayed(one, runs, seeds)
    }
    if one.group == "sources" and curves:
        yield Panel("evictions known after, ms", one.title, "bars", curves)


def claims_of(system: str, found: Sequence[VariantComparison], grid: Grid, groups: Sequence[str]) -> Iterator[Claim]:
    """Yield the published figures of some groups, with this project's first policy of each comparison."""
    seeds = grid.seeds
    for one in (each.scaled(grid.scale) for each in found if each.group in groups):
        ours = next((name for name in OURS if name in one.variants), None)
        bounds = {target.figure: target.at_least for target in one.targets if target.at_least is not None}
        for target in (target for target in one.targets if target.published is not None):
            of, against, figure = target.of, target.against, target.figure
            yield Claim(
                system=system,
                on=f"{one.title}, {one.base.traffic.requests:,} requests",
                figure=f"{figure}, {against} / {of}" if one.inverted else f"{figure}, {of} / {against}",
                published=cast(Published, target.published),
                tasks=[one.task(name, seed) for seed in seeds for name in sorted({of, against, ours or of})],
                reproduced=partial(one.ratio, of, against, figure, seeds),
                ours=partial(one.ratio, ours, against, figure, seeds) if ours else None,
                ours_name=ours or "",
                target=f">= {bounds[figure]:.2f}" if figure in bounds else "",
            )
