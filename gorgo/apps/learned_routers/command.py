"""`python -m gorgo.apps.learned_routers`: the comparisons, their runs and tables.

OUT/runs/KEY.json     one run, see `gorgo.apps.claims.run_cache`
OUT/slices.json       figures over time of every run
OUT/*.svg, *.png      pictures, with --pictures
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import mean

from gorgo.apps.claims.run_cache import RunCache
from gorgo.apps.claims.runner import Runner
from gorgo.apps.claims.table import TableSection, as_markdown, sections
from gorgo.apps.learned_routers.comparison import RouterComparison, Runs
from gorgo.apps.learned_routers.drawing import write_pictures
from gorgo.apps.learned_routers.groups import comparisons
from gorgo.apps.learned_routers.measure import RouterRun, RouterTask, measure
from gorgo.apps.learned_routers.pictures import pictures
from gorgo.apps.report import require_extra
from gorgo.apps.results import ResultRow
from gorgo.apps.simulate.compare import mean_interval, mean_row
from gorgo.config.atomic import PUBLIC, write_atomically
from gorgo.errors import MissingExtra

HEADER = ("on", "of", "against", "figure", "published", "claim", "against / of [95 %]", "met")
MEANS_HEADER = (
    "on", "policy", "seeds", "TTFT mean ms", "p50", "p95", "p99", "E2E p50 s", "p95", "TPOT p50 ms", "p99",
    "E2E/token ms", "tokens/s", "hit %", "MAPE %", "failed", "rho", "shares of pools", "decided by",
    "model TTFT off %", "median %", "model TPOT off %", "TPOT median %",
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit code; raise what a run raises."""
    parser = _parser()
    options = parser.parse_args(arguments)
    groups = dict.fromkeys(one.group for one in comparisons())
    if unknown := set(options.only or ()) - set(groups):
        parser.error(f"--only {min(unknown)}: no such group; there are: {', '.join(groups)}")
    chosen = [
        replace(one, traffic=one.traffic.scaled(options.scale))
        for one in comparisons(None if options.trace is None else str(options.trace))
        if not options.only or one.group in options.only
    ]
    if options.pictures:
        try:
            require_extra("a picture")
        except MissingExtra as error:
            parser.error(f"--pictures: {error}")
    runner: Runner[RouterTask, RouterRun] = Runner(
        measure, RouterTask.key, RunCache(options.out / "runs", RouterRun), n_jobs=options.jobs
    )
    seeds = range(options.seeds)
    tasks = list(dict.fromkeys(task for one in chosen for task in one.tasks(seeds)))
    runs = runner.runs(tasks, title="learned routers")
    _write_slices(options.out, runs)
    if options.pictures:
        write_pictures(options.out, pictures(chosen, runs, seeds), suffix=options.pictures)
    print(as_markdown(_sections(chosen, runs, seeds), _summary(chosen, runs, seeds)), end="")  # noqa: T201
    return 0


def _sections(chosen: Sequence[RouterComparison], runs: Runs, seeds: Sequence[int]) -> list[TableSection]:
    verdicts = [verdict for one in chosen for verdict in one.verdicts(runs, seeds)]
    means = [row for one in chosen for row in _means(one, runs, seeds)]
    return [*sections(verdicts, HEADER, {}), TableSection("Means over seeds", MEANS_HEADER, means)]


def _means(one: RouterComparison, runs: Runs, seeds: Sequence[int]) -> Iterator[tuple[str, ...]]:
    for variant in dict.fromkeys((one.against, *one.variants, *one.also)):
        found = [runs[one.task(variant, seed)] for seed in seeds]
        row = mean_row([run.row for run in found])
        errors = [100 * error for run in found if (error := run.row.prediction_error_ratio) is not None]
        yield (
            one.label,
            variant,
            str(len(found)),
            *_stats(row),
            _with_interval(errors, ".1f"),
            str(row.errors),
            _with_interval([run.rho for run in found if run.rho is not None], ".3f"),
            _pools(row),
            _fallbacks(found),
            *_errors(found),
        )


def _stats(row: ResultRow) -> Iterator[str]:
    ttft, e2e, tpot = row.ttft_ms, row.e2e_s, row.tpot_ms
    for value, form, factor in (
        *((part, ".0f", 1) for part in (ttft.mean, ttft.p50, ttft.p95, ttft.p99)),
        (e2e.p50, ".2f", 1),
        (e2e.p95, ".2f", 1),
        (tpot.p50, ".1f", 1),
        (tpot.p99, ".1f", 1),
        (row.e2e_per_token_ms.mean, ".1f", 1),
        (row.tokens_per_s, ".0f", 1),
        (row.cache_hit, ".1f", 100),
    ):
        yield "-" if value is None else format(factor * value, form)


def _with_interval(values: Sequence[float], form: str) -> str:
    """Return the mean and, of several seeds, its 95 % interval."""
    if not values:
        return "-"
    shown = [format(value, form) for value in mean_interval(values)]
    return shown[0] if len(shown) == 1 else f"{shown[0]} [{shown[1]}-{shown[2]}]"


def _pools(row: ResultRow) -> str:
    """Return the share of each pool of replicas, %."""
    shares: dict[str, float] = {}
    for name, share in row.share.items():
        pool = name.rpartition("-")[0]
        shares[pool] = shares.get(pool, 0.0) + share
    return "/".join(f"{pool} {100 * share:.0f}" for pool, share in shares.items())


def _fallbacks(runs: Sequence[RouterRun]) -> str:
    """Return the share of the decisions by each guard, % of all, the most common first."""
    counts: dict[str, int] = {}
    for run in runs:
        for word, count in run.fallbacks.items():
            counts[word] = counts.get(word, 0) + count
    whole = sum(counts.values()) or 1
    ordered = sorted(counts.items(), key=lambda item: -item[1])
    return ", ".join(f"{word or 'policy'} {100 * count / whole:.1f}" for word, count in ordered)


def _errors(runs: Sequence[RouterRun]) -> Iterator[str]:
    """Yield the models' errors of TTFT and time per token, %: mean and median of requests, means over runs."""
    for name in ("ttft_mean", "ttft_median", "tpot_mean", "tpot_median"):
        known = [error for run in runs if (error := getattr(run.model_errors, name)) is not None]
        yield f"{100 * mean(known):.1f}" if known else "-"


def _summary(chosen: Sequence[RouterComparison], runs: Runs, seeds: Sequence[int]) -> str:
    verdicts = [verdict for one in chosen for verdict in one.verdicts(runs, seeds)]
    claimed = [verdict for verdict in verdicts if verdict.met is not None]
    cpu_s = sum(run.cpu_s for run in runs.values())
    requests = mean(run.row.n for run in runs.values()) if runs else 0
    return (
        f"{sum(bool(one.met) for one in claimed)} of {len(claimed)} claims met, all simulated; {len(runs)} runs of "
        f"{requests:.0f} measured requests on average, {cpu_s:.0f} s of processor time."
    )


def _write_slices(out: Path, runs: Runs) -> None:
    found = [
        {"variant": task.variant, "fleet": task.fleet, "on": task.traffic.label, "seed": task.seed}
        | {"slices": [asdict(one) for one in run.slices], "replica_ttft_ms": dict(run.replica_ttft_ms)}
        | {"adopted_s": list(run.adopted_s)}
        for task, run in runs.items()
    ]
    out.mkdir(parents=True, exist_ok=True)
    write_atomically(out / "slices.json", json.dumps(found).encode() + b"\n", mode=PUBLIC)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m gorgo.apps.learned_routers", description="Compare learned routers with their published figures."
    )
    parser.add_argument("--only", action="append", metavar="GROUP", help="this group of comparisons; repeatable")
    parser.add_argument("--seeds", type=int, default=5, help="runs of each variant")
    parser.add_argument("--scale", type=float, default=1.0, help="multiple of the requests of each run")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="Mooncake's conversation trace")
    parser.add_argument("--out", type=Path, default=Path("runs/learned-routers"), help="folder of runs")
    parser.add_argument(
        "--pictures",
        nargs="?",
        const="svg",
        choices=("svg", "png"),
        help="draw OUT/*.svg, or *.png with `png`, which needs the extra report",
    )
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time; -1 is one per core")
    return parser
