"""Several routers over one fleet: alone, with a store between them, and as one; replaced, overloaded, and many."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from statistics import mean
from typing import Any, NamedTuple

from experiments.comparison import MEASURES
from experiments.fleets import ExperimentFleet
from experiments.reports import Grid, SystemReport
from experiments.runner import Runner, Runs
from experiments.simulated import REPLACED_SLICES, SimTask, TaskRun
from experiments.tables import TableSection, number
from experiments.traffic import ChatTraffic
from experiments.variants import Variant
from gorgo.lab.sim.fleet import find_fleet
from gorgo.lab.sim.routers import SHARINGS, RouterGroup, Sharing
from gorgo.lab.traces import TraceFilters

NAME, TITLE = "routers", "several routers"
#: The fleet of all runs: the paper's, of three regions.
FLEET = "paper"
_PAPER, _GORGO_MS = ExperimentFleet(name=FLEET), Variant(policy="gorgo-ms")
#: Answers of 128 tokens at most, and prompts of 24,000, as in the tuner's windows.
_FILTERS = TraceFilters(max_input=24_000, max_output=128)
CHAT = ChatTraffic(name="ART-Chat-like", trace="art-chat-apr5", requests=2000, filters=_FILTERS)
#: Its time stamps have whole seconds: requests of one are scattered.
CONVERSATION = ChatTraffic(name="conversation", trace="", requests=1600, filters=replace(_FILTERS, spread_s=3.0))
#: Loads of each, as multiples of its own.
LOADS: Mapping[str, Sequence[float]] = {CHAT.name: (0.5, 1.0), CONVERSATION.name: (0.5, 0.8)}
#: Rows of `multi-depth` with the number of routers, what they share, the bound of each route table (a small one is a
#: tenth of what it would have), and the delay of reports, s.
_ROUTES: Sequence[tuple[str, int, Sharing, int | None, float]] = (
    ("one", 1, "all", None, 0.005),
    ("alone", 4, "none", None, 0.005),
    ("alone, 1,000 routes", 4, "none", 1000, 0.005),
    ("0.005 s, 1,000 routes", 4, "store", 1000, 0.005),
    *((f"{delay_s:g} s", 4, "store", None, delay_s) for delay_s in (0.005, 0.1, 1.0, 10.0)),
)
#: Capacity of the fleet for this traffic, in multiples of its own load, by `gorgo overload`; and the overload.
CAPACITY, OVERLOAD = 1.04, 1.3
#: Columns of n routers.
_SHARED: Mapping[str, Sharing] = {"alone": "none", "store": "store"}
#: Processes of one router.
PROCESSES = (2, 4, 8, 16)
#: Replicas and routers of a large group, and its traffic: as many requests a replica as at half of the load.
LARGE, _LARGE_REQUESTS = (512, 100), 1500
ROUTERS_HEADER = ("hit, % / p95 TTFT, ms / p95 E2E, s", "alone", "store", "one")
#: How far a store is behind one router, with the least and most of the seeds, and the share of what routers alone lose
#: that it wins back.
TARGETS_HEADER = ("store against one", "hit, points", "p95 TTFT, %", "p95 E2E, %", "won back, %", "missed")
DELAY_HEADER = (
    "reports late by", "hit, %", "p95 TTFT, ms", "remote routes evicted", "local routes evicted", "bytes a request",
)  # fmt: skip
_SLICES = tuple(f"{begin:g} to {end:g} s" for begin, end in REPLACED_SLICES)
OVERLOAD_HEADER = ("goodput, %", "one", "alone", "store")
#: Targets: points of hits, ratios of latencies, share won back.
HIT_POINTS, RATIO, WON_BACK = 1.0, 1.03, 0.5
#: Figures of a cell, by row and column: a run per seed.
Cells = Mapping[tuple[str, str], Sequence[TaskRun]]


class Labelled(NamedTuple):
    """A run with the row and the column of its figures."""

    group: str
    row: str
    column: str
    task: SimTask


def runs_of(groups: Sequence[str], grid: Grid) -> list[Labelled]:
    """Return the runs of some groups; without the conversation trace where the grid has none."""
    half, beyond = CHAT.at(0.5), CHAT.at(round(CAPACITY * OVERLOAD, 3))
    columns: Sequence[tuple[str, int, Sharing]] = (("one", 1, "all"), ("alone", 4, "none"), ("store", 4, "store"))
    replacements: Sequence[tuple[str, Sharing, float | None]] = (
        ("not replaced", "none", None), ("no store", "none", 0.5), ("store", "store", 0.5),
    )  # fmt: skip
    made = [
        *_routers(grid.trace, grid.counts),
        *_processes(),
        *(_labelled("delay", row, "figures", half, count, sharing, delay_s=delay_s,
                    variant=Variant(policy="multi-depth", max_routes=max_routes))
          for row, count, sharing, max_routes, delay_s in _ROUTES),
        *(_labelled("replaced", row, "one router", half, 1, sharing, around_replacement=True, replaced_after=after)
          for row, sharing, after in replacements),
        *(_labelled("overload", f"{OVERLOAD} times capacity", column, beyond, count, sharing, queueing=True)
          for column, count, sharing in columns),
        *_large(),
    ]  # fmt: skip
    found = [each for group in groups for each in made if each.group == group]
    return [
        each._replace(task=replace(each.task.scaled(grid.scale), seed=seed)) for seed in grid.seeds for each in found
    ]


def _labelled(
    group: str, row: str, column: str, traffic: ChatTraffic, count: int, sharing: Sharing, *,
    delay_s: float | None = 0.005, variant: Variant = _GORGO_MS, fleet: ExperimentFleet = _PAPER, **more: Any,
) -> Labelled:  # fmt: skip
    """Return a run of so many routers; `more` are further fields of its task."""
    routers = RouterGroup(count=count, sharing=sharing, delay_s=delay_s)
    return Labelled(group, row, column, SimTask(variant=variant, fleet=fleet, traffic=traffic, routers=routers, **more))


def _routers(trace: str | None, counts: Sequence[int]) -> Iterator[Labelled]:
    traffics = [CHAT] if trace is None else [CHAT, replace(CONVERSATION, trace=trace)]
    for traffic in (each.at(load) for each in traffics for load in LOADS[each.name]):
        yield _labelled("routers", f"{traffic.name}/1", "one", traffic, 1, "all")
        for count, (column, sharing) in product(counts, _SHARED.items()):
            yield _labelled("routers", f"{traffic.name}/{count}", column, traffic, count, sharing)


def _processes() -> Iterator[Labelled]:
    for load in LOADS[CHAT.name]:
        yield _labelled("processes", f"{load:g}", "1", CHAT.at(load), 1, "all")
        for count in PROCESSES:
            yield _labelled("processes", f"{load:g}", str(count), CHAT.at(load), count, "local", delay_s=None)


def _large() -> Iterator[Labelled]:
    replicas, count = LARGE
    load = round(0.5 * replicas / len(find_fleet(FLEET).replicas), 1)
    traffic, fleet = replace(CHAT.at(load), requests=_LARGE_REQUESTS), ExperimentFleet(name=FLEET, replicas=replicas)
    for sharing in SHARINGS[:2]:
        yield _labelled("large", sharing, "figures", traffic, count, sharing, fleet=fleet)


# -- figures of a cell


def _figure(runs: Sequence[TaskRun], name: str) -> float:
    """Return the mean over seeds of a measure, hits in %."""
    return (100 if name == "hit" else 1) * mean(MEASURES[name](run.row) or 0.0 for run in runs)


def _three(runs: Sequence[TaskRun]) -> str:
    return f"{_figure(runs, 'hit'):.1f} / {_figure(runs, 'p95 TTFT'):.0f} / {_figure(runs, 'p95 E2E'):.2f}"


def _value(runs: Sequence[TaskRun], name: str) -> float:
    return mean(run.values.get(name) or 0.0 for run in runs)


def _bytes(runs: Sequence[TaskRun]) -> str:
    return f"{_value(runs, 'report_bytes'):.0f}" if any("report_bytes" in run.values for run in runs) else "-"


# -- tables


def report(groups: Sequence[str], grid: Grid, runner: Runner) -> SystemReport:
    labelled = runs_of(groups, grid)
    runs = runner.runs([one.task for one in labelled], title=TITLE)
    tables = [section for group in groups for section in _TABLES[group](_cells(labelled, runs, group))]
    cpu_s = sum(run.cpu_s for run in runs.values())
    return SystemReport(sections=tables, end=f"All simulated; {len(runs)} runs, {cpu_s:.0f} s of processor time.")


def _cells(labelled: Sequence[Labelled], runs: Runs, group: str) -> Cells:
    cells: dict[tuple[str, str], list[TaskRun]] = {}
    for one in labelled:
        if one.group == group:
            cells.setdefault((one.row, one.column), []).append(runs[one.task])
    return cells


def _against_each_other(cells: Cells) -> Iterator[TableSection]:
    rows, targets = [], []
    for row in (row for row, column in cells if column == "store"):
        one = cells[f"{row.rsplit('/', 1)[0]}/1", "one"]
        alone, store = cells[row, "alone"], cells[row, "store"]
        rows.append((row, *map(_three, (alone, store, one))))
        targets.append((row, *_against_one(alone, store, one)))
    yield TableSection("Routers alone, with a store, and one", ROUTERS_HEADER, rows)
    yield TableSection("Targets", TARGETS_HEADER, targets)


#: What a store is measured by: more hits are better, and less time is.
_STORE_MEASURES = {"hit": "hit", "TTFT": "p95 TTFT", "E2E": "p95 E2E"}


def _against_one(alone: Sequence[TaskRun], store: Sequence[TaskRun], one: Sequence[TaskRun]) -> Iterator[str]:
    """Yield how far the store is behind one router, the share of the loss of routers alone that it wins back ("-" where
    they lose nothing), and which targets are missed."""
    won, missed, missed_won = [], [], []
    for title, name in _STORE_MEASURES.items():
        behind = _behind(name, store, one)
        of_seeds = [_behind(name, [ours], [theirs]) for ours, theirs in zip(store, one, strict=True)]
        yield f"{behind:+.1f} [{min(of_seeds):+.1f}, {max(of_seeds):+.1f}]"
        if behind < -HIT_POINTS if name == "hit" else _figure(store, name) / _figure(one, name) > RATIO:
            missed.append(title)
        sign = 1 if name == "hit" else -1
        lost = sign * (_figure(one, name) - _figure(alone, name))
        share = sign * (_figure(store, name) - _figure(alone, name)) / lost if lost > 0 else None
        won.append(number(share, ".0f", 100))
        if share is not None and share < WON_BACK:
            missed_won.append(f"{title} won back")
    yield " / ".join(won)
    yield ", ".join([*missed, *missed_won]) or "none"


def _behind(name: str, store: Sequence[TaskRun], one: Sequence[TaskRun]) -> float:
    """Return by how much a store differs from one router: points of hits, or %."""
    ours, theirs = _figure(store, name), _figure(one, name)
    return ours - theirs if name == "hit" else 100 * (ours / theirs - 1)


def _of_processes(cells: Cells) -> Iterator[TableSection]:
    loads, counts = (list(dict.fromkeys(names)) for names in zip(*cells, strict=True))
    header = ("processes: hit, % / p95 TTFT, ms / p95 E2E, s", *(f"load {load}" for load in loads))
    rows = [(count, *(_three(cells[load, count]) for load in loads)) for count in counts]
    yield TableSection("One router of several processes", header, rows)


def _late(cells: Cells) -> Iterator[TableSection]:
    rows = [
        (row, f"{_figure(runs, 'hit'):.1f}", f"{_figure(runs, 'p95 TTFT'):.0f}",
         *(f"{_value(runs, f'{origin} routes'):.2f}" for origin in ("remote", "local")), _bytes(runs))
        for (row, _), runs in cells.items()
    ]  # fmt: skip
    yield TableSection("`multi-depth`, four routers", DELAY_HEADER, rows)


def _around_replacement(cells: Cells) -> Iterator[TableSection]:
    rows = []
    for (row, _), runs in cells.items():
        parts = [[run.lists[name] for run in runs] for name in _SLICES]
        shown = [f"{100 * mean(hit for hit, _ in each):.1f} / {mean(ms for _, ms in each):.0f}" for each in parts]
        rows.append((row, *shown))
    yield TableSection("A router is killed and replaced", ("hit, % / p95 TTFT, ms", *_SLICES), rows)


def _goodput(cells: Cells) -> Iterator[TableSection]:
    rows = [
        (row, *(f"{100 * _value(cells[row, column], 'good'):.1f}" for column in OVERLOAD_HEADER[1:]))
        for row in dict.fromkeys(row for row, _ in cells)
    ]
    yield TableSection("Goodput", OVERLOAD_HEADER, rows)


def _of_large(cells: Cells) -> Iterator[TableSection]:
    header = (f"{LARGE[0]} replicas, {LARGE[1]} routers", "requests", "virtual, s", "CPU, s", "bytes a request")
    rows = [
        (row, str(runs[0].row.n), f"{_value(runs, 'lasted_s'):.0f}", f"{mean(run.cpu_s for run in runs):.0f}",
         _bytes(runs))
        for (row, _), runs in cells.items()
    ]  # fmt: skip
    yield TableSection("A large group", header, rows)


#: The tables of each group.
_TABLES = {"routers": _against_each_other, "processes": _of_processes, "delay": _late,
           "replaced": _around_replacement, "overload": _goodput, "large": _of_large}  # fmt: skip
GROUPS = tuple(_TABLES)
