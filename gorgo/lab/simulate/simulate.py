"""`gorgo simulate`: every policy at every load and seed, and the files that it leaves.

Owns the list of runs, the tables that are printed (a block per load, policies as rows, and ratios to the first policy),
the folder, and the same for programs and notebooks (`run_policies`, `data_frame`). Leaves a run to
`gorgo.lab.simulate.run` and the statistics to `gorgo.lab.simulate.compare`. The folder:

    OUT/results.json                         a row per run
    OUT/POLICY/xSCALE-seedSEED/              one run: its row in results.json, its requests in requests.jsonl
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from warnings import warn

from rich import box
from rich.console import Console
from rich.table import Table

from gorgo.config.atomic import create_text_file
from gorgo.config.load import load_config
from gorgo.config.model import Config
from gorgo.core.policy.weights import Weights
from gorgo.errors import MissingExtra
from gorgo.lab.datasets import is_shape
from gorgo.lab.failures import failure_lines
from gorgo.lab.progress import shown_progress
from gorgo.lab.prompt_text import warning
from gorgo.lab.results import SIMULATED, ResultRow, load_text, results_table, write_results
from gorgo.lab.sim.fleet import SimFleet, chosen_fleet, limits_of, with_queue_for_all
from gorgo.lab.sim.routers import ONE_ROUTER, RouterGroup
from gorgo.lab.sim.scenarios import Scenario, chosen_scenario, find_scenario
from gorgo.lab.simulate.compare import Figure, Ratio, e2e_s_p95, mean_row, ratio_of_rows, ttft_ms_p95, units_of
from gorgo.lab.simulate.job import BASELINES, FLOOR, ORACLE, PINNED, STEADY, SimJob, SimulatedRun
from gorgo.lab.simulate.run import policy_of, run_many
from gorgo.lab.traces import TraceFilters
from gorgo.policies.registry import PUBLISHED, make_shadow

if TYPE_CHECKING:
    import pandas as pd

#: This project's, the published one, the paper's four baselines, and chance.
DEFAULT_POLICIES = ("gorgo-ms", *PUBLISHED)


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulateOptions:
    """Options of a comparison: of a grid of `SimJob`, one per policy, load and seed.

    Parameters
    ----------
    job:
        What all of them have in common. Policy, weights, load and seed are those of each; no baseline has a shadow.
    policies:
        In the order of the table.
    baselines:
        Rows behind them, of oracle, pinned and floor.
    weights:
        Per policy; others run with their defaults.
    time_scales, seeds:
        Each policy runs at each of them.
    out:
        Folder for the files; None: nothing is written.
    n_jobs:
        As in `run_many`.
    show_progress:
        Progress on stderr.
    """

    job: SimJob
    policies: Sequence[str] = DEFAULT_POLICIES
    baselines: Sequence[str] = BASELINES
    weights: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    time_scales: Sequence[float] = (1.0,)
    seeds: Sequence[int] = (0,)
    out: Path | None = None
    n_jobs: int = -1
    show_progress: bool = True

    @property
    def seed_note(self) -> str | None:
        """Return what is unlike between the seeds of this workload; None with one seed."""
        if len(self.seeds) < 2:
            return None
        if is_shape(self.job.trace):
            return "A seed draws the requests anew, and the jitter of the network and ties."
        scatter = ", the scatter of equal time stamps" if self.job.filters.spread_s else ""
        return f"A seed draws the jitter of the network{scatter} and ties; the requests are the file's (see --windows)."

    @property
    def names(self) -> Sequence[str]:
        """All rows of a block, each once."""
        return tuple(dict.fromkeys((*self.policies, *self.baselines)))


def simulate_command(options: SimulateOptions, *, warn: Callable[[str], None]) -> list[ResultRow]:
    """Run all jobs and write the files of `out`; return the rows in the order of scale, policy, seed and window.

    `warn` gets sentences about the trace.

    Raises `UnknownPolicy`, `UnknownScenario`, `WeightsError` or `TraceError`, if possible before the first run.
    """
    _check(options)
    jobs = jobs_of(options)
    rows: dict[tuple[float, str, int], Sequence[ResultRow]] = {}
    warned: dict[str, str | None] = {}
    shown = shown_progress("simulate", len(jobs)) if options.show_progress else nullcontext(None)
    with shown as advance:
        for run in run_many(jobs, n_jobs=options.n_jobs):
            rows[_place(run.job)] = run.result_rows
            warned.setdefault(run.job.policy, warning(run.job.policy, run.key_share))
            if run.warning is not None:
                warned.setdefault(run.job.trace, run.warning)
            if advance is not None:
                advance(f"{run.job.policy}, {load_text(run.job.time_scale)}, seed {run.job.seed}")
            if options.out is not None:
                _write_run(options.out, run)
    for text in filter(None, warned.values()):
        warn(text)
    ordered = [row for job in jobs for row in rows[_place(job)]]
    if options.out is not None:
        write_results(options.out, ordered)
    return ordered


def jobs_of(options: SimulateOptions) -> list[SimJob]:
    """A job per row."""
    return list(_jobs(options))


def _jobs(options: SimulateOptions) -> Iterator[SimJob]:
    for time_scale in dict.fromkeys(options.time_scales):
        for policy in options.names:
            for seed in options.seeds:
                yield replace(
                    options.job,
                    policy=policy,
                    weights=options.weights.get(policy),
                    time_scale=time_scale,
                    seed=seed,
                    shadow=None if policy in BASELINES else options.job.shadow,
                    keep_requests=options.out is not None,
                )


def _check(options: SimulateOptions) -> None:
    """Raise for a wrong name or weight before the first run."""
    scenario = find_scenario(options.job.scenario)
    scenario.planned(scenario.applied_to(options.job.fleet), 1.0)
    options.job.routers.placed(scenario.topology)
    for name in options.names:
        if name != FLOOR:
            Weights.of(policy_of(name).weight_specs, options.weights.get(name), version=1, allow_out_of_range=True)
    for name in options.policies:
        if name not in BASELINES:
            make_shadow(options.job.shadow, policy_of(name))


def _place(job: SimJob) -> tuple[float, str, int]:
    return job.time_scale, job.policy, job.seed


def _write_run(out: Path, run: SimulatedRun) -> None:
    """One run's own folder, in the form of a live replay's."""
    folder = out / run.job.policy / f"load-{1 / run.job.time_scale:g}-seed-{run.job.seed}"
    write_results(folder, run.result_rows)
    with create_text_file(folder / "requests.jsonl") as file:
        for record in run.requests or ():
            print(json.dumps(record.as_json()), file=file)


#: Of the rows that are no policies.
_MEANINGS = {
    ORACLE: "the rule of gorgo-ms with full knowledge of the engines; not the optimum, it can lose.",
    PINNED: "each session on one replica, assigned with knowledge of the whole trace; not the optimum.",
    FLOOR: "each request alone on the nearest idle replica, all seen so far cached; a lower bound.",
}
#: Requests of a run below which its p99 rests on fewer than ten.
P99_REQUESTS = 1000
_RATIOS: tuple[tuple[str, Figure], ...] = (("p95 TTFT", ttft_ms_p95), ("p95 E2E", e2e_s_p95))


def show_rows(
    rows: Sequence[ResultRow],
    policies: Sequence[str],
    console: Console,
    *,
    columns: Sequence[str] = SIMULATED,
    seed_note: str | None = None,
) -> None:
    """Every comparison in the rows, `policies` in their order, and of its table these `columns`."""
    for trace, time_scale in dict.fromkeys((row.trace, row.time_scale) for row in rows):
        block = [row for row in rows if (row.trace, row.time_scale) == (trace, time_scale)]
        groups = [[row for row in block if row.policy == policy] for policy in policies]
        groups = [group for group in groups if group]
        console.print(f"{_title(block)}\n", style="bold", highlight=False)
        console.print(results_table([mean_row(group) for group in groups], baselines=BASELINES, columns=columns))
        for line in _notes(groups, columns):
            console.print(line, style="dim", highlight=False, soft_wrap=True, markup=False)
        if units_of(block) > 1 and len(groups) > 1:
            console.print()
            console.print(_ratios(groups))
            divided = f"{groups[0][0].policy}'s figure / the row's, below 1 is better"
            console.print(f"{divided}: mean [95 % interval] over {_units(block)}, paired", style="dim", soft_wrap=True)
        for line in _failures([mean_row(group) for group in groups]):
            console.print(line, style="yellow", highlight=False, soft_wrap=True, markup=False)
        console.print()
    if seed_note is not None:
        console.print(seed_note)
    console.print("Quantiles are interpolated between neighbours (numpy's default), per run; means are of runs.")
    console.print("Engines and network are simulated, in virtual time; the Router is the one that `gorgo serve` runs.")
    for name, meaning in _MEANINGS.items():
        if name in policies:
            console.print(f"{name}: {meaning}")


def _notes(groups: Sequence[Sequence[ResultRow]], columns: Sequence[str]) -> Iterator[str]:
    """Yield what limits the figures: requests that failed are in none, and few requests have no p99."""
    counts = {rows[0].policy or "-": (sum(row.n for row in rows), sum(row.errors for row in rows)) for rows in groups}
    if any(errors for _, errors in counts.values()):
        shares = ", ".join(f"{name} {n - errors:,} of {n:,}" for name, (n, errors) in counts.items())
        yield f"latencies are of requests that succeeded: {shares}"
    served = [row.n - row.errors for rows in groups for row in rows]
    if served and min(served) < P99_REQUESTS and any(name.endswith("-p99") for name in columns):
        fewest, unit = min(served), "run" if groups[0][0].window is None else "window"
        yield f"p99 of {fewest:,} requests a {unit} rests on the {fewest // 100 + 1:,} slowest"


def _failures(rows: Sequence[ResultRow]) -> Iterator[str]:
    """Yield why requests failed, policies that failed alike in one line."""
    policies: dict[str, list[str]] = {}
    for row in rows:
        for line in failure_lines(row.failures, row.n):
            policies.setdefault(line, []).append(row.policy or "-")
    for line, names in policies.items():
        yield f"failed, {', '.join(names)}: {line}"


def _title(block: Sequence[ResultRow]) -> str:
    row = block[0]
    first = [one for one in block if (one.policy, one.seed) == (row.policy, row.seed)]
    many = f", means of {_units(block)}" if len({(one.seed, one.window) for one in block}) > 1 else f", seed {row.seed}"
    return f"{row.trace} at {load_text(row.time_scale)}: {sum(one.n for one in first)} requests{many}"


def _units(block: Sequence[ResultRow]) -> str:
    """Return what an interval is over: seeds, or windows, each the mean of its seeds."""
    seeds, windows = len({row.seed for row in block}), len({row.window for row in block})
    if windows == 1:
        return f"{seeds} seeds"
    return f"{windows} windows" if seeds == 1 else f"{windows} windows of {seeds} seeds"


def _ratios(groups: Sequence[Sequence[ResultRow]]) -> Table:
    first = groups[0]
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column(f"{first[0].policy} / ...", no_wrap=True)
    for name, _ in _RATIOS:
        table.add_column(f"ratio of {name}", justify="right", no_wrap=True)
    for group in groups[1:]:
        table.add_row(group[0].policy or "-", *_cells(first, group))
    return table


def _cells(first: Sequence[ResultRow], group: Sequence[ResultRow]) -> Iterator[str]:
    for _, figure in _RATIOS:
        yield _words(ratio_of_rows(first, group, figure))


def _words(ratio: Ratio | None) -> str:
    if ratio is None:
        return "-"
    if ratio.low is None:
        return f"{ratio.value:.3f}"
    return f"{ratio.value:.3f} \\[{ratio.low:.3f}, {ratio.high:.3f}]"


#: The file of the fleet, of the intervals and of the weights of its policy, where none is named.
REGIONS = Path("regions.yaml")


def run_policies(
    trace: str | Path,
    policies: Sequence[str] = DEFAULT_POLICIES,
    *,
    load: float | Sequence[float] = 1.0,
    seeds: int | Sequence[int] = 1,
    config: Path | Config = REGIONS,
    n_jobs: int = -1,
    show_progress: bool = False,
    **options: Any,
) -> list[ResultRow]:
    """Run every policy and baseline at every load and seed; return a row per run and window.

    Parameters
    ----------
    trace:
        A file, or the name of a data set or shape.
    policies:
        Names; the defaults are those of the command.
    load:
        One or several multiples of the trace's own load.
    seeds:
        So many from 0, or these.
    config:
        regions.yaml, or a loaded one.
    n_jobs:
        Processes; -1: one a core.
    options:
        As in `simulate_options`.

    Warnings about the trace are Python's. Raises what `gorgo simulate` prints as errors, all `GorgoError`.

    Example
    -------
    >>> from gorgo.config.load import parse_config
    >>> here = b"{regions: [{name: x}], proxy: {region: x}, replicas: [{name: a, region: x, url: 'http://a'}]}"
    >>> config, some = parse_config(here), TraceFilters(limit=20)
    >>> rows = run_policies("chat-small", ["gorgo-ms"], fleet="paper", config=config, n_jobs=1, filters=some)
    >>> [row.policy for row in rows], rows[0].n, rows[0].queue
    (['gorgo-ms', 'oracle', 'pinned', 'floor'], 20, False)
    """
    wanted = simulate_options(
        trace,
        policies,
        time_scales=[1 / one for one in ([load] if isinstance(load, int | float) else load)],
        seeds=range(seeds) if isinstance(seeds, int) else seeds,
        config=config,
        n_jobs=n_jobs,
        show_progress=show_progress,
        **options,
    )
    return simulate_command(wanted, warn=lambda text: warn(text, stacklevel=3))


def simulate_options(
    trace: str | Path,
    policies: Sequence[str] = DEFAULT_POLICIES,
    *,
    time_scales: Sequence[float] = (1.0,),
    seeds: Sequence[int] = (0,),
    config: Path | Config = REGIONS,
    source: Path = REGIONS,
    fleet: str | SimFleet | None = None,
    baselines: Sequence[str] = BASELINES,
    weights: Mapping[str, Mapping[str, float]] | None = None,
    queue: bool = False,
    filters: TraceFilters | None = None,
    scenario: str | Path | Scenario = STEADY,
    shadow: str | None = None,
    block_tokens: int | None = None,
    routers: RouterGroup = ONE_ROUTER,
    closed_loop: bool = False,
    warm_s: float = 0.0,
    windows: int = 1,
    out: Path | None = None,
    n_jobs: int = -1,
    show_progress: bool = True,
) -> SimulateOptions:
    """Return the options of a comparison, those that are not named as the command line has them.

    `baselines` are the rows of no policy: `oracle`, by far the slowest to run, `pinned` and `floor`. `fleet` is a name
    of `gorgo fleets`, or one of your own; None: that of `config`. `scenario` is a name, a file (`*.yaml`) or one of
    your own. `weights` are by policy, beside those that `config` has for its own; `source` names a loaded `config` in
    errors. With `queue` every policy has the queue of the proxy; without it none has.
    """
    source, loaded = (config, load_config(config)) if isinstance(config, Path) else (source, config)
    configured = {loaded.proxy.policy: dict(loaded.proxy.weights)}
    chosen = fleet if isinstance(fleet, SimFleet) else chosen_fleet(loaded, fleet, source=source)
    job = SimJob(
        trace=str(trace),
        policy=next(iter((*policies, *baselines)), FLOOR),
        fleet=chosen,
        filters=filters or TraceFilters(),
        scenario=chosen_scenario(scenario, chosen),
        limits=with_queue_for_all(limits_of(loaded), enabled=queue),
        probe_interval_s=loaded.proxy.probe_interval_s,
        scrape_interval_s=loaded.proxy.scrape_interval_s,
        shadow=shadow,
        block_tokens=block_tokens,
        routers=routers,
        closed_loop=closed_loop,
        warm_s=warm_s,
        windows=windows,
    )
    return SimulateOptions(
        job=job,
        policies=tuple(dict.fromkeys(policies)),
        baselines=tuple(baselines),
        weights={**configured, **(weights or {})},
        time_scales=time_scales,
        seeds=seeds,
        out=out,
        n_jobs=n_jobs,
        show_progress=show_progress,
    )


def data_frame(rows: Sequence[ResultRow]) -> pd.DataFrame:
    """Return a row per run and window, with the columns of `flat_rows`.

    Raises `MissingExtra` where pandas is not installed.
    """
    try:
        import pandas as pd
    except ModuleNotFoundError as error:
        raise MissingExtra(
            "a data frame needs pandas, which is not installed: pip install 'gorgo-router[notebook]'"
        ) from error
    return pd.DataFrame(flat_rows(rows))


def flat_rows(rows: Sequence[ResultRow]) -> list[dict[str, Any]]:
    """Return rows of one level, for `data_frame` and for other packages' tables: `ttft_ms_p95` and so on.

    `load` is beside `time_scale`. Weights, shares and failures have a column per name.
    """
    return [{**_flat("", row.as_json()), "load": 1 / row.time_scale} for row in rows]


def _flat(prefix: str, value: Mapping[str, Any]) -> dict[str, Any]:
    cells: dict[str, Any] = {}
    for name, inner in value.items():
        if isinstance(inner, Mapping):
            cells |= _flat(f"{prefix}{name}_", inner)
        else:
            cells[f"{prefix}{name}"] = inner
    return cells
