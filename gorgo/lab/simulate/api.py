"""Comparisons for programs and notebooks: what `gorgo simulate` runs, with its defaults, as rows.

Owns the step from names and numbers to `SimulateOptions`, which the command line takes too, and rows as a data frame.
Leaves the runs to `gorgo.lab.simulate.simulate`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from warnings import warn

from gorgo.config.load import load_config
from gorgo.config.model import Config
from gorgo.errors import MissingExtra
from gorgo.lab.results import ResultRow
from gorgo.lab.sim.faults.scenarios import Scenario, chosen_scenario
from gorgo.lab.sim.fleet import SimFleet
from gorgo.lab.sim.routers.group import ONE_ROUTER, RouterGroup
from gorgo.lab.simulate.fleet import chosen_fleet, limits_of, with_queue_for_all
from gorgo.lab.simulate.job import BASELINES, STEADY
from gorgo.lab.simulate.simulate import DEFAULT_POLICIES, SimulateOptions, simulate_command
from gorgo.lab.traces import TraceFilters

if TYPE_CHECKING:
    import pandas as pd

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
    own = {loaded.proxy.policy: dict(loaded.proxy.weights)}
    chosen = fleet if isinstance(fleet, SimFleet) else chosen_fleet(loaded, fleet, source=source)
    return SimulateOptions(
        trace=str(trace),
        fleet=chosen,
        filters=filters or TraceFilters(),
        policies=tuple(dict.fromkeys(policies)),
        baselines=tuple(baselines),
        weights={**own, **(weights or {})},
        time_scales=time_scales,
        seeds=seeds,
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
    found: dict[str, Any] = {}
    for name, inner in value.items():
        if isinstance(inner, Mapping):
            found |= _flat(f"{prefix}{name}_", inner)
        else:
            found[f"{prefix}{name}"] = inner
    return found
