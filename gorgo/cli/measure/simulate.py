"""Commands in virtual time: `gorgo simulate`, `gorgo overload`, and the lists of what simulations can run with.

Owns their arguments, which are checked here, and what they print. Leaves the runs to `gorgo.lab.simulate`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from gorgo.cli import options
from gorgo.cli.tables import Cell, table, wide_console

if TYPE_CHECKING:
    from gorgo.config.model import Config
    from gorgo.lab.sim.routers import RouterGroup
    from gorgo.lab.simulate.overload import OverloadRow


Name = TypeVar("Name", bound=str)

#: Width of a row with its name, ten statistics and three ratios.
TABLE_WIDTH = 100


def simulate(
    trace: options.Trace,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            show_default=False,
            help="Policy to run; repeatable. Default: gorgo-ms, gorgo and five others. Ratios are of the first.",
        ),
    ] = None,
    load: options.Loads = None,
    time_scale: options.TimeScales = None,
    seeds: options.Seeds = 1,
    scenario: Annotated[
        str, typer.Option(metavar="NAME|FILE", help="Scenario of faults or changes: a name, or a file *.yaml.")
    ] = "steady",
    shadow: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            show_default=False,
            help="Shadow policy that ranks each choice, for `gorgo rank`; use with random.",
        ),
    ] = None,
    routers: Annotated[
        int, typer.Option(min=1, max=1000, help="Routers over the fleet; --split says which requests each gets.")
    ] = 1,
    split: Annotated[
        str,
        typer.Option(
            metavar="random|session|region",
            help="Requests of a router: random ones, whole sessions, or whole sessions with each router in a region.",
        ),
    ] = "random",
    sharing: Annotated[
        str,
        typer.Option(
            metavar="none|store|local|all",
            help="Shared by routers: nothing, reports by a store or between workers of one machine, or one sees all.",
        ),
    ] = "none",
    peer_delay: Annotated[
        float | None,
        typer.Option(
            min=0,
            callback=options.finite,
            metavar="MS",
            show_default=False,
            help="Delay of reports between routers; default: 5, with --sharing local 1.",
        ),
    ] = None,
    peer_loss: Annotated[
        float, typer.Option(min=0, max=1, metavar="SHARE", help="Share of reports that a router never gets.")
    ] = 0.0,
    queue: Annotated[
        str,
        typer.Option(
            metavar="on|off", help="Queue of the proxy before saturated replicas: under every policy, or under none."
        ),
    ] = "off",
    baseline: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            show_default=False,
            help="Row of no policy: oracle, pinned, floor, or none; repeatable. Default: all three.",
        ),
    ] = None,
    weights: Annotated[
        Path | None,
        typer.Option(metavar="FILE", show_default=False, help="Weights file; its policy runs with these weights."),
    ] = None,
    column: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            show_default=False,
            help="Column of the table, as ttft-p99, tpot-mean or goodput; repeatable. An unknown name lists all.",
        ),
    ] = None,
    config: options.Config = options.REGIONS_YAML,
    fleet: options.Fleet = None,
    limit: options.Limit = None,
    max_input: options.MaxInput = None,
    max_output: options.MaxOutput = None,
    spread: options.Spread = 0.0,
    start: options.Start = None,
    end: options.End = None,
    block_tokens: options.BlockTokens = None,
    user_sessions: options.UserSessions = False,
    closed_loop: options.ClosedLoop = False,
    warm: options.Warm = 0.0,
    windows: options.Windows = 1,
    out: options.Out = None,
    jobs: options.Jobs = None,
    seed: options.Seed = 0,
    as_json: options.Json = False,
) -> None:
    """Compare policies on a trace in virtual time.

    The Router and the policies are those of the proxy; engines and network are simulated. A seed gives all policies the
    same jitter. Three more rows are no policies: `oracle` applies the rule of gorgo-ms with full knowledge of the
    engines and can lose; `pinned` has each session on one replica, assigned with knowledge of the whole trace; `floor`
    runs each request alone and is a lower bound. Requests that fail in the simulation are a
    result: the table says why, and the exit code is 0.

    No row has a queue at the proxy, so that routing alone is compared. With --queue on every row but `floor` has that
    of `overload` in regions.yaml; `gorgo serve` queues under policies that predict TTFT.
    """
    from gorgo.config.load import load_config
    from gorgo.lab.simulate import DEFAULT_POLICIES, simulate_command, simulate_options

    columns = _columns(column)
    loaded = load_config(config)
    policies = tuple(dict.fromkeys(policy or DEFAULT_POLICIES))
    wanted = simulate_options(
        options.trace_path(trace),
        policies,
        time_scales=options.time_scales_of(time_scale, load),
        seeds=range(seed, seed + seeds),
        config=loaded,
        source=config,
        fleet=fleet,
        baselines=_baselines(baseline),
        weights=_weights(loaded, weights, policies, source=config),
        queue=_one_of(("on", "off"), queue, "--queue") == "on",
        filters=options.trace_filters(
            limit=limit,
            max_input=max_input,
            max_output=max_output,
            spread=spread,
            start=start,
            end=end,
            seed=seed,
            user_sessions=user_sessions,
        ),
        scenario=scenario,
        shadow=shadow,
        block_tokens=block_tokens,
        routers=_group(routers, split, sharing, delay_ms=peer_delay, loss=peer_loss),
        closed_loop=closed_loop,
        warm_s=warm,
        windows=windows,
        out=out,
        n_jobs=-1 if jobs is None else jobs,
    )
    rows = simulate_command(wanted, warn=lambda text: typer.echo(f"gorgo: {text}", err=True))
    if as_json:
        from gorgo.lab.results import rows_as_json

        typer.echo(rows_as_json(rows))
    else:
        from gorgo.lab.simulate.simulate import show_rows

        show_rows(rows, wanted.names, wide_console(TABLE_WIDTH), columns=columns, seed_note=wanted.seed_note)


def _group(count: int, split: str, sharing: str, *, delay_ms: float | None, loss: float) -> RouterGroup:
    """Return the routers, or raise a usage error for an unknown kind of split or sharing."""
    from gorgo.lab.sim.routers import SHARINGS, SPLITS, RouterGroup

    return RouterGroup(
        count=count,
        split=_one_of(SPLITS, split, "--split"),
        sharing=_one_of(SHARINGS, sharing, "--sharing"),
        delay_s=None if delay_ms is None else delay_ms / 1e3,
        loss=loss,
    )


def _one_of(choices: Sequence[Name], named: str, option: str) -> Name:
    for one in choices:
        if named == one:
            return one
    raise typer.BadParameter(f"{option} {named}: expected one of: {', '.join(choices)}")


def _baselines(named: list[str] | None) -> Sequence[str]:
    """Return the baselines in their order, or raise a usage error for an unknown one."""
    from gorgo.lab.simulate import BASELINES

    chosen = {_one_of((*BASELINES, "none"), name, "--baseline") for name in named or BASELINES}
    return tuple(name for name in BASELINES if name in chosen)


def _columns(named: list[str] | None) -> Sequence[str]:
    """Return the columns of the table, or raise a usage error for an unknown one."""
    from gorgo.lab.results import COLUMNS, SIMULATED

    for name in named or ():
        if name not in COLUMNS:
            raise typer.BadParameter(f"--column {name}: no such column; there are: {', '.join(COLUMNS)}")
    return tuple(dict.fromkeys(named)) if named else SIMULATED


def _weights(
    config: Config, file: Path | None, policies: tuple[str, ...], *, source: Path
) -> Mapping[str, Mapping[str, float]]:
    """Return weights by policy: those of the file, and those of regions.yaml for its own policy.

    Raises `ConfigError` for a file whose policy is not simulated.
    """
    from gorgo.cli.policies import compose_policy
    from gorgo.errors import ConfigError

    configured, values = compose_policy(config, source=source)
    by_policy = {configured.name: dict(values)}
    if file is not None:
        named, values = compose_policy(config, source=source, weights_file=file)
        if named.name not in policies:
            wanted = ", ".join(policies)
            raise ConfigError(f"{file}: weights are for the policy {named.name!r}; simulated are {wanted}")
        by_policy[named.name] = dict(values)
    return by_policy


def scenarios(as_json: options.Json = False) -> None:
    """List the scenarios of `gorgo simulate --scenario`.

    With --json, each as a file that `--scenario` reads.
    """
    from gorgo.lab.sim.scenarios import SCENARIOS, as_document

    if as_json:
        options.print_json([as_document(one) for one in SCENARIOS.values()])
        return
    typer.echo(table(["scenario", "what happens"], [[one.name, one.description] for one in SCENARIOS.values()]))


def fleets(as_json: options.Json = False) -> None:
    """List the fleets of `--fleet`, the router told the truth about every engine."""
    from gorgo.lab.sim.fleet import FLEETS

    if as_json:
        rows = [{"name": one.name, "description": one.description, **asdict(one.fleet())} for one in FLEETS.values()]
        options.print_json(rows)
        return
    typer.echo(table(["fleet", "engines and links"], [[one.name, one.description] for one in FLEETS.values()]))


def profiles(as_json: options.Json = False) -> None:
    """List the engine profiles for `simulation.profile` of regions.yaml.

    With --json, also the coefficients of each and their source.
    """
    from gorgo.lab.sim.engine.profiles import PROFILES

    if as_json:
        options.print_json([asdict(one) for one in PROFILES.values()])
        return
    header = ["profile", "estimate", "prefill tokens/s", "ms per token alone", "kv tokens", "batch", "context"]
    rows: list[list[Cell]] = [
        [
            one.name,
            "yes" if one.is_estimate else "",
            round(one.prefill_tokens_per_s),
            one.decode_s(1, 0) * 1e3,
            one.kv_tokens,
            one.max_running_requests,
            one.context_tokens,
        ]
        for one in PROFILES.values()
    ]
    typer.echo(table(header, rows))


def overload(
    trace: options.Trace,
    policy: Annotated[str, typer.Option(metavar="NAME", help="Routing policy; one that predicts TTFT.")] = "gorgo-ms",
    load: Annotated[
        list[float] | None,
        typer.Option(
            min=0.01,
            callback=options.finite,
            show_default=False,
            help="Load as a multiple of capacity; repeatable. Default: 0.7, 1, 1.3, 3.",
        ),
    ] = None,
    config: options.Config = options.REGIONS_YAML,
    fleet: options.Fleet = None,
    limit: options.Limit = None,
    max_input: options.MaxInput = None,
    max_output: options.MaxOutput = None,
    spread: options.Spread = 0.0,
    seed: options.Seed = 0,
    as_json: options.Json = False,
) -> None:
    """Find the capacity of a fleet on a trace in virtual time, and its goodput beyond it.

    Capacity is the highest load at which 95 % of requests get their first token within 2 s and their last within 10 s,
    each dispatched at once. At each multiple of it there are two rows: without the queue of the proxy and with it.
    Queued requests have these times as deadline and goal unless overload.slo_ttft_ms and slo_e2e_ms are configured.
    """
    from gorgo.config.load import load_config
    from gorgo.lab.sim.fleet import chosen_fleet, limits_of
    from gorgo.lab.simulate import SimJob
    from gorgo.lab.simulate.overload import LOADS, capacity_scale, overload_rows

    loaded = load_config(config)
    filters = options.trace_filters(limit=limit, max_input=max_input, max_output=max_output, spread=spread, seed=seed)
    job = SimJob(
        trace=str(options.trace_path(trace)),
        policy=policy,
        fleet=chosen_fleet(loaded, fleet, source=config),
        filters=filters,
        seed=seed,
        limits=limits_of(loaded),
        probe_interval_s=loaded.proxy.probe_interval_s,
        scrape_interval_s=loaded.proxy.scrape_interval_s,
    )
    capacity = capacity_scale(job)
    rows = overload_rows(job, capacity=capacity, loads=tuple(load or LOADS))
    if as_json:
        options.print_json([row.as_json() for row in rows])
    else:
        _show(rows, capacity)


def _show(rows: Sequence[OverloadRow], capacity: float) -> None:
    typer.echo(f"capacity of {rows[0].row.policy} on {rows[0].row.trace}: {1 / capacity:.3f} of the trace's own load")
    typer.echo("load: a multiple of capacity")
    typer.echo("  load  dispatch  good %  good/s  rejected %  queued %  hedged %  TTFT p95 ms  E2E p95 s")
    for row in rows:
        goodput, dispatch = row.goodput, "queued" if row.queueing else "at once"
        ttft, e2e = row.row.ttft_ms.p95, row.row.e2e_s.p95
        typer.echo(
            f"{row.load:>6g}  {dispatch:<8}  {goodput.good * 100:>6.1f}  {goodput.per_s:>6.2f}"
            f"  {goodput.rejected * 100:>10.1f}  {goodput.queued * 100:>8.1f}  {goodput.hedged * 100:>8.2f}"
            f"  {'-' if ttft is None else f'{ttft:.0f}':>11}  {'-' if e2e is None else f'{e2e:.2f}':>9}"
        )
