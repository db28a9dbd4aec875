"""What the comparisons of learned routers share: the task of a run, the tables of ratios and means, published rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from statistics import mean

from experiments.comparison import MEASURES, ComparisonTarget, VariantComparison, rows_of
from experiments.fleets import ExperimentFleet
from experiments.grid import Grid, SystemReport
from experiments.pictures import Pictured, pictures_of
from experiments.published import Claim, Published
from experiments.runner import Runner
from experiments.simulated import SimTask, TaskRun
from experiments.tables import TableSection, number, sections, with_interval
from experiments.traffic import PhasedTraffic, ReuseTraffic
from experiments.variants import Variant
from gorgo.lab.results import ResultRow
from gorgo.lab.sim.kv_events.reports import CacheReports
from gorgo.lab.simulate.compare import mean_row

GORGO_MS, RESIDUAL, EVENTS = "gorgo-ms", "gorgo-residual", "gorgo-ms, events"
#: This project's policies; the first that a comparison has stands beside the published one.
OURS = (RESIDUAL, EVENTS, GORGO_MS)
MEAN, P99 = "mean TTFT", "p99 TTFT"
#: Lodestar's interval of scrapes, s.
USUAL_SCRAPES_S = 0.1
PROBE_S, WARM_UP = 10.0, 0.5
HEADER = ("on", "of", "against", "figure", "published", "claim", "against / of [95 %]", "met")
MEANS_HEADER = (
    "on", "policy", "seeds", "TTFT mean ms", "p50", "p95", "p99", "E2E p50 s", "p95", "TPOT p50 ms", "p99",
    "E2E/token ms", "tokens/s", "hit %", "MAPE %", "failed", "rho", "shares of pools", "decided by",
    "model TTFT off %", "median %", "model TPOT off %", "TPOT median %",
)  # fmt: skip


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
    return VariantComparison(
        group=group,
        title=f"{fleet}: {traffic.label}{scrapes}{reports}",
        base=SimTask(
            variant=Variant(policy=GORGO_MS),
            fleet=ExperimentFleet(name=fleet),
            traffic=traffic,
            warm_up=WARM_UP,
            probe_s=PROBE_S,
            scrape_s=scrape_s,
            cache_reports=cache_reports,
        ),
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


def report_of(
    found: Sequence[VariantComparison], grid: Grid, runner: Runner, pictured: Mapping[str, Pictured]
) -> SystemReport:
    """Run comparisons and return ratios by group, then means of every variant."""
    found = [one.scaled(grid.scale) for one in found]
    tasks = list(dict.fromkeys(task for one in found for task in one.tasks(grid.seeds)))
    runs = runner.runs(tasks, title="comparisons")
    verdicts = [verdict for one in found for verdict in one.verdicts(runs, grid.seeds, published=True)]
    means = [
        row
        for one in found
        for variant in one.variants
        for row in _means(one, variant, one.runs_of(variant, runs, grid.seeds))
    ]
    claimed = [verdict for verdict in verdicts if verdict.met is not None]
    cpu_s = sum(run.cpu_s for run in runs.values())
    requests = mean(run.row.n for run in runs.values()) if runs else 0
    return SystemReport(
        sections=[*sections(verdicts, HEADER), TableSection("Means over seeds", MEANS_HEADER, means)],
        end=(
            f"{sum(bool(one.met) for one in claimed)} of {len(claimed)} claims met, all simulated; {len(runs)} runs of "
            f"{requests:.0f} measured requests on average, {cpu_s:.0f} s of processor time."
        ),
        pictures=pictures_of(found, runs, grid.seeds, pictured) if grid.pictures else (),
        rows=[verdict.as_json() for verdict in verdicts],
    )


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


def _means(one: VariantComparison, variant: str, found: Sequence[TaskRun]) -> Iterator[tuple[str, ...]]:
    if not found:
        return
    row = mean_row(rows_of(found))
    errors = [100 * error for run in found if (error := run.row.prediction_error_ratio) is not None]
    rho = [value for run in found if (value := run.values.get("rho")) is not None]
    yield (
        one.title,
        variant,
        str(len(found)),
        *_stats(row),
        with_interval(errors, ".1f"),
        str(row.errors),
        with_interval(rho, ".3f"),
        _pools(row),
        _fallbacks(found),
        *(_error(found, name) for name in ("ttft_mean", "ttft_median", "tpot_mean", "tpot_median")),
    )


def _stats(row: ResultRow) -> Iterator[str]:
    for name in ("mean TTFT", "p50 TTFT", "p95 TTFT", "p99 TTFT"):
        yield number(MEASURES[name](row), ".0f")
    for name, form in (("p50 E2E", ".2f"), ("p95 E2E", ".2f"), ("p50 TPOT", ".1f"), ("p99 TPOT", ".1f")):
        yield number(MEASURES[name](row), form)
    yield number(row.e2e_per_token_ms.mean, ".1f")
    yield number(row.tokens_per_s, ".0f")
    yield number(row.cache_hit, ".1f", 100)


def _pools(row: ResultRow) -> str:
    """Return the share of each pool of replicas, %."""
    shares: dict[str, float] = {}
    for name, share in row.share.items():
        pool = name.rpartition("-")[0]
        shares[pool] = shares.get(pool, 0.0) + share
    return "/".join(f"{pool} {100 * share:.0f}" for pool, share in shares.items())


def _fallbacks(runs: Sequence[TaskRun]) -> str:
    """Return the share of the decisions by each guard, % of all, the most common first."""
    counts: dict[str, int] = {}
    for run in runs:
        for word, count in run.fallbacks.items():
            counts[word] = counts.get(word, 0) + count
    whole = sum(counts.values()) or 1
    ordered = sorted(counts.items(), key=lambda item: -item[1])
    return ", ".join(f"{word or 'policy'} {100 * count / whole:.1f}" for word, count in ordered)


def _error(runs: Sequence[TaskRun], name: str) -> str:
    """Return a model's error, %: the mean over runs of the mean or median over requests."""
    known = [error for run in runs if (error := run.values.get(name)) is not None]
    return f"{100 * mean(known):.1f}" if known else "-"
