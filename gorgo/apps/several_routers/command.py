"""`python -m gorgo.apps.several_routers`: the runs and their tables.

OUT/runs/KEY.json     one run, see `gorgo.apps.claims.run_cache`
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean

from gorgo.apps.claims.run_cache import RunCache
from gorgo.apps.claims.runner import Runner
from gorgo.apps.claims.table import TableSection, as_markdown
from gorgo.apps.several_routers.groups import COUNTS, GROUPS, LARGE, Labelled, runs_of
from gorgo.apps.several_routers.measure import SLICES, RoutersRun, RoutersTask, measure

#: Figures of a cell, by row and column: a list per seed.
Cells = Mapping[tuple[str, str], Sequence[RoutersRun]]

ROUTERS_HEADER = ("hit, % / p95 TTFT, ms / p95 E2E, s", "alone", "store", "one")
#: How far a store is behind one router, with the least and most of the seeds, and the share of what routers alone lose
#: that it wins back.
TARGETS_HEADER = ("store against one", "hit, points", "p95 TTFT, %", "p95 E2E, %", "won back, %", "missed")
DELAY_HEADER = (
    "reports late by", "hit, %", "p95 TTFT, ms", "remote routes evicted", "local routes evicted", "bytes a request",
)  # fmt: skip
REPLACED_HEADER = ("hit, % / p95 TTFT, ms", *(f"{begin:g} to {end:g} s" for begin, end in SLICES))
OVERLOAD_HEADER = ("goodput, %", "one", "alone", "store")
LARGE_HEADER = (f"{LARGE[0]} replicas, {LARGE[1]} routers", "requests", "virtual, s", "CPU, s", "bytes a request")
#: Targets: points of hits, ratios of latencies, share won back.
HIT_POINTS, RATIO, WON_BACK = 1.0, 1.03, 0.5


def main(arguments: Sequence[str] | None = None) -> int:
    """Return the exit code; raise what a run raises."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if unknown := set(options.only or ()) - set(GROUPS):
        parser.error(f"--only {min(unknown)}: no such group; there are: {', '.join(GROUPS)}")
    groups = [group for group in GROUPS if not options.only or group in options.only]
    found = runs_of(groups, trace=options.trace, counts=options.count or COUNTS, seeds=range(options.seeds))
    labelled = [_scaled(one, options.scale) for one in found]
    runner: Runner[RoutersTask, RoutersRun] = Runner(
        measure, RoutersTask.cache_key, RunCache(options.out / "runs", RoutersRun), n_jobs=options.jobs
    )
    runs = runner.runs([one.task for one in labelled], title="several routers")
    tables = [_TABLES[group](_cells(labelled, runs, group)) for group in groups]
    sections = [section for table in tables for section in table]
    cpu_s = sum(run.cpu_s for run in runs.values())
    print(as_markdown(sections, f"All simulated; {len(runs)} runs, {cpu_s:.0f} s of processor time."), end="")  # noqa: T201
    return 0


def _scaled(one: Labelled, factor: float) -> Labelled:
    traffic = one.task.traffic
    return replace(
        one, task=replace(one.task, traffic=replace(traffic, requests=max(20, round(traffic.requests * factor))))
    )


def _cells(labelled: Sequence[Labelled], runs: Mapping[RoutersTask, RoutersRun], group: str) -> Cells:
    cells: dict[tuple[str, str], list[RoutersRun]] = {}
    for one in labelled:
        if one.group == group:
            cells.setdefault((one.row, one.column), []).append(runs[one.task])
    return cells


def _hit(runs: Sequence[RoutersRun]) -> float:
    return 100 * mean(run.row.cache_hit or 0.0 for run in runs)


def _ttft_ms(runs: Sequence[RoutersRun]) -> float:
    return mean(run.row.ttft_ms.p95 or 0.0 for run in runs)


def _e2e_s(runs: Sequence[RoutersRun]) -> float:
    return mean(run.row.e2e_s.p95 or 0.0 for run in runs)


def _routers(cells: Cells) -> list[TableSection]:
    rows, targets = [], []
    for row, column in cells:
        if column != "store":
            continue
        one = cells[f"{row.rsplit('/', 1)[0]}/1", "one"]
        alone, store = cells[row, "alone"], cells[row, "store"]
        shown = [f"{_hit(runs):.1f} / {_ttft_ms(runs):.0f} / {_e2e_s(runs):.2f}" for runs in (alone, store, one)]
        rows.append((row, *shown))
        targets.append((row, *_against_one(alone, store, one)))
    return [
        TableSection("Routers alone, with a store, and one", ROUTERS_HEADER, rows),
        TableSection("Targets", TARGETS_HEADER, targets),
    ]


def _against_one(
    alone: Sequence[RoutersRun], store: Sequence[RoutersRun], one: Sequence[RoutersRun]
) -> tuple[str, ...]:
    points = _hit(store) - _hit(one)
    ttft, e2e = _ttft_ms(store) / _ttft_ms(one), _e2e_s(store) / _e2e_s(one)
    won_back = [
        None if share is None else 100 * share
        for share in (
            _won_back(_hit(alone), _hit(store), _hit(one)),
            _won_back(-_ttft_ms(alone), -_ttft_ms(store), -_ttft_ms(one)),
            _won_back(-_e2e_s(alone), -_e2e_s(store), -_e2e_s(one)),
        )
    ]
    missed = [
        name for name, bad in (("hit", points < -HIT_POINTS), ("TTFT", ttft > RATIO), ("E2E", e2e > RATIO)) if bad
    ]
    names = ("hit", "TTFT", "E2E")
    missed += [
        f"{name} won back"
        for name, share in zip(names, won_back, strict=True)
        if share is not None and share < 100 * WON_BACK
    ]
    seeds = [([of_store], [of_one]) for of_store, of_one in zip(store, one, strict=True)]
    return (
        _with_range(points, [_hit(a) - _hit(b) for a, b in seeds]),
        _with_range(_percent(ttft), [_percent(_ttft_ms(a) / _ttft_ms(b)) for a, b in seeds]),
        _with_range(_percent(e2e), [_percent(_e2e_s(a) / _e2e_s(b)) for a, b in seeds]),
        " / ".join("-" if share is None else f"{share:.0f}" for share in won_back),
        ", ".join(missed) or "none",
    )


def _percent(ratio: float) -> float:
    return 100 * (ratio - 1)


def _with_range(of_means: float, of_seeds: Sequence[float]) -> str:
    return f"{of_means:+.1f} [{min(of_seeds):+.1f}, {max(of_seeds):+.1f}]"


def _won_back(alone: float, store: float, one: float) -> float | None:
    """Return the share of the loss of routers alone that a store wins back; `None` where they lose nothing."""
    return (store - alone) / (one - alone) if one > alone else None


def _delay(cells: Cells) -> list[TableSection]:
    rows = []
    for (row, _), runs in cells.items():
        sent = [run.report_bytes for run in runs if run.report_bytes is not None]
        evicted = [mean(run.evicted[f"{origin} routes"] for run in runs) for origin in ("remote", "local")]
        rows.append(
            (row, f"{_hit(runs):.1f}", f"{_ttft_ms(runs):.0f}", *(f"{each:.2f}" for each in evicted),
             f"{mean(sent):.0f}" if sent else "-")
        )  # fmt: skip
    return [TableSection("`multi-depth`, four routers", DELAY_HEADER, rows)]


def _replaced(cells: Cells) -> list[TableSection]:
    rows = []
    for (row, _), runs in cells.items():
        slices = [[run.slices[number] for run in runs] for number in range(len(SLICES))]
        shown = [f"{100 * mean(hit for hit, _ in each):.1f} / {mean(ms for _, ms in each):.0f}" for each in slices]
        rows.append((row, *shown))
    return [TableSection("A router is killed and replaced", REPLACED_HEADER, rows)]


def _overload(cells: Cells) -> list[TableSection]:
    columns = OVERLOAD_HEADER[1:]
    rows = [
        (row, *(f"{100 * mean(run.good for run in cells[row, column]):.1f}" for column in columns))
        for row in dict.fromkeys(row for row, _ in cells)
    ]
    return [TableSection("Goodput", OVERLOAD_HEADER, rows)]


def _large(cells: Cells) -> list[TableSection]:
    rows = []
    for (row, _), runs in cells.items():
        sent = [run.report_bytes for run in runs if run.report_bytes is not None]
        means = [mean(getattr(run, name) for run in runs) for name in ("lasted_s", "cpu_s")]
        sizes = f"{mean(sent):.0f}" if sent else "-"
        rows.append((row, str(runs[0].row.n), *(f"{each:.0f}" for each in means), sizes))
    return [TableSection("A large group", LARGE_HEADER, rows)]


_TABLES = {"routers": _routers, "delay": _delay, "replaced": _replaced, "overload": _overload, "large": _large}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m gorgo.apps.several_routers", description="Compare several routers over a fleet with one."
    )
    parser.add_argument("--only", action="append", metavar="GROUP", help="this group of runs; repeatable")
    parser.add_argument("--trace", metavar="FILE", help="Mooncake's conversation trace; default: without it")
    parser.add_argument("--count", action="append", type=int, metavar="N", help="so many routers; repeatable")
    parser.add_argument("--seeds", type=int, default=3, help="runs of each cell")
    parser.add_argument("--scale", type=float, default=1.0, help="multiple of the requests of each run")
    parser.add_argument("--out", type=Path, default=Path("runs/several-routers"), help="folder of runs")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time; -1 is one per core")
    return parser
