"""`python -m gorgo.apps.cache_sources`: the comparisons, their runs and tables.

OUT/runs/KEY.json     one run, see `gorgo.apps.claims.run_cache`
OUT/*.svg, *.png      pictures, with --pictures
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean

from gorgo.apps.cache_sources.comparison import CacheComparison, Runs, rows_of
from gorgo.apps.cache_sources.groups import comparisons
from gorgo.apps.cache_sources.measure import CacheRun, CacheTask, measure
from gorgo.apps.cache_sources.pictures import pictures
from gorgo.apps.claims.run_cache import RunCache
from gorgo.apps.claims.runner import Runner
from gorgo.apps.claims.table import TableSection, as_markdown, sections
from gorgo.apps.learned_routers.drawing import write_pictures
from gorgo.apps.report import require_extra
from gorgo.apps.simulate.compare import mean_row
from gorgo.errors import MissingExtra

TARGETS_HEADER = ("on", "of", "against", "figure", "target", "of / against [95 %]", "met")
MEANS_HEADER = (
    "on", "with", "seeds", "mean TTFT, ms", "p50", "p95", "p99", "hit, %", "phantom, %", "missed, %",
    "bytes a request", "failed",
)  # fmt: skip
#: Behind these a column for each variant: phantom, missed and found tokens, %.
TIMES_HEADER = ("from, s", "begins")
DELAYS_HEADER = ("evictions on", "with", "region", "p50, ms", "p95, ms", "p99, ms")


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit code; raise what a run raises."""
    parser = _parser()
    options = parser.parse_args(arguments)
    groups = dict.fromkeys(one.group for one in comparisons())
    if unknown := set(options.only or ()) - set(groups):
        parser.error(f"--only {min(unknown)}: no such group; there are: {', '.join(groups)}")
    chosen = [_scaled(one, options.scale) for one in comparisons() if not options.only or one.group in options.only]
    if options.pictures:
        try:
            require_extra("a picture")
        except MissingExtra as error:
            parser.error(f"--pictures: {error}")
    runner: Runner[CacheTask, CacheRun] = Runner(
        measure, CacheTask.cache_key, RunCache(options.out / "runs", CacheRun), n_jobs=options.jobs
    )
    seeds = range(options.seeds)
    tasks = list(dict.fromkeys(task for one in chosen for task in one.tasks(seeds)))
    runs = runner.runs(tasks, title="sources of cached tokens")
    if options.pictures:
        write_pictures(options.out, pictures(chosen, runs, seeds), suffix=options.pictures)
    print(as_markdown(_sections(chosen, runs, seeds), _summary(runs)), end="")  # noqa: T201
    return 0


def _scaled(one: CacheComparison, factor: float) -> CacheComparison:
    if factor == 1:
        return one
    return replace(one, traffic=replace(one.traffic, requests=max(20, round(one.traffic.requests * factor))))


def _sections(chosen: Sequence[CacheComparison], runs: Runs, seeds: Sequence[int]) -> list[TableSection]:
    verdicts = [verdict for one in chosen for verdict in one.verdicts(runs, seeds)]
    found = sections(verdicts, TARGETS_HEADER, {})
    means = [row for one in chosen for row in _means(one, runs, seeds)]
    delays = [row for one in chosen for row in _delays(one, runs, seeds)]
    found.append(TableSection("Means over seeds", MEANS_HEADER, means))
    found += [TableSection("Delay of evictions", DELAYS_HEADER, delays)] if delays else []
    for one in chosen:
        if one.by_time:
            header = (*TIMES_HEADER, *(variant.label for variant in one.variants))
            found.append(
                TableSection(f"Phantom / missed / hit, %: {one.title}", header, list(_times(one, runs, seeds)))
            )
    return found


def _means(one: CacheComparison, runs: Runs, seeds: Sequence[int]) -> Iterator[tuple[str, ...]]:
    for variant in one.variants:
        found = one.runs_of(variant, runs, seeds)
        row = mean_row(rows_of(found))
        sent = [run.bytes_per_request for run in found if run.bytes_per_request is not None]
        ttft = row.ttft_ms
        yield (
            one.title,
            variant.label,
            str(len(found)),
            *("-" if value is None else f"{value:.0f}" for value in (ttft.mean, ttft.p50, ttft.p95, ttft.p99)),
            "-" if row.cache_hit is None else f"{100 * row.cache_hit:.1f}",
            f"{100 * mean(run.phantom for run in found):.2f}",
            f"{100 * mean(run.missed for run in found):.2f}",
            f"{mean(sent):.0f}" if sent else "-",
            str(row.errors),
        )


def _times(one: CacheComparison, runs: Runs, seeds: Sequence[int]) -> Iterator[tuple[str, ...]]:
    """Yield a row per slice that every run has, as means over seeds."""
    by_variant = [one.runs_of(variant, runs, seeds) for variant in one.variants]
    count = min(len(run.slices) for found in by_variant for run in found)
    for number in range(count):
        begins_s = by_variant[0][0].slices[number].begins_s
        cells = []
        for found in by_variant:
            parts = [run.slices[number] for run in found]
            shares = (mean(getattr(part, name) for part in parts) for name in ("phantom", "missed", "hit"))
            cells.append(" / ".join(f"{100 * share:.1f}" for share in shares))
        yield f"{begins_s:.0f}", one.marks.get(begins_s, ""), *cells


def _delays(one: CacheComparison, runs: Runs, seeds: Sequence[int]) -> Iterator[tuple[str, ...]]:
    for variant in one.variants:
        if variant.source not in ("push", "events") or one.by_time:
            continue
        by_region: dict[str, list[Sequence[float]]] = {}
        for run in one.runs_of(variant, runs, seeds):
            for region, delays in run.eviction_delays_ms.items():
                by_region.setdefault(region, []).append(delays)
        for region, found in by_region.items():
            quantiles = (mean(values) for values in zip(*found, strict=True))
            yield one.title, variant.label, region, *(f"{value:.1f}" for value in quantiles)


def _summary(runs: Runs) -> str:
    cpu_s = sum(run.cpu_s for run in runs.values())
    return f"All simulated; {len(runs)} runs, {cpu_s:.0f} s of processor time."


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m gorgo.apps.cache_sources", description="Compare sources of what a router knows of caches."
    )
    parser.add_argument("--only", action="append", metavar="GROUP", help="this group of comparisons; repeatable")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each variant")
    parser.add_argument("--scale", type=float, default=1.0, help="multiple of the requests of each run")
    parser.add_argument("--out", type=Path, default=Path("runs/cache-sources"), help="folder of runs")
    parser.add_argument(
        "--pictures",
        nargs="?",
        const="svg",
        choices=("svg", "png"),
        help="write SVG or PNG files to OUT, needs the extra report",
    )
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time; -1 is one per core")
    return parser
