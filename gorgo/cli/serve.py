"""`gorgo serve`, the regional proxy, and `gorgo picker`, the endpoint picker behind Envoy."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gorgo.cli import launch, options

if TYPE_CHECKING:
    from gorgo.live.listener.sockets import ServerAddresses


def serve(
    context: typer.Context,
    config: options.Config = options.REGIONS_YAML,
    replica: Annotated[
        list[str] | None,
        typer.Option(
            metavar="[REGION=]URL",
            show_default=False,
            help="Replica instead of a file, in the region `local` by default; repeatable.",
        ),
    ] = None,
    engine: Annotated[
        str, typer.Option(metavar="NAME", help="Engine of each --replica; `auto` is found by asking.")
    ] = "auto",
    print_config: Annotated[
        bool, typer.Option("--print-config", help="Print the configuration as regions.yaml, and exit.")
    ] = False,
    bind: Annotated[
        str | None, typer.Option(metavar="HOST:PORT", help="Address of the data listener; port 0 takes a free one.")
    ] = None,
    admin_bind: Annotated[str | None, typer.Option(metavar="HOST:PORT", help="Address of the admin listener.")] = None,
    processes: Annotated[
        str | None,
        typer.Option(
            metavar="N|auto", show_default=False, help="Processes that serve as one router; auto: one per processor."
        ),
    ] = None,
    takeover: Annotated[
        bool,
        typer.Option(
            "--takeover", help="Take the listeners of the router that runs with the same admin address; it then ends."
        ),
    ] = False,
    policy: launch.PolicyName = None,
    weights: options.Weights = None,
    state: launch.StateFile = None,
    request_log: launch.RequestLog = None,
    outcome_log: launch.OutcomeLog = None,
    seed: options.MaybeSeed = None,
    plain: Annotated[
        bool,
        typer.Option("--plain", help="HTTP by hypercorn, Starlette and httpx: slower, without httptools or uvloop."),
    ] = False,
    log_format: options.LogFormat = "json",
    log_level: options.LogLevel = "info",
) -> None:
    """Run the regional proxy.

    Clients use the OpenAI or SGLang API; the proxy chooses a replica per request. SIGTERM lets running streams finish.
    """
    from gorgo.cli.validation import Overrides
    from gorgo.config.load import config_text, read_text

    worker, inherited = launch.worker_start(plain=plain), launch.inherited_listeners()
    overrides = Overrides(
        environ=os.environ,
        admin_token=options.admin_token() if worker is None else worker[0].admin_token,
        metrics_token=options.metrics_token(),
        policy=policy,
        weights_file=weights,
        bind=_address("--bind", bind),
        admin_bind=_address("--admin-bind", admin_bind),
        ports=worker is None and inherited is None and not takeover,
    )
    if worker is not None:
        config, text = Path("--replica") if _chosen(context, replica) else config, worker[0].text
    elif _chosen(context, replica):
        config = Path("--replica")
        proxy = {"policy": policy, "bind": bind, "admin_bind": admin_bind}
        text = config_text(replica or (), engine=engine, proxy=proxy, environ=os.environ).encode()
    else:
        text = (
            read_text(config, expected="a regions.yaml file, or gorgo serve --replica URL") if worker is None else b""
        )
    start = launch.Launch(
        config=config,
        text=text,
        overrides=overrides,
        state=state,
        request_log=request_log,
        outcome_log=outcome_log,
        seed=seed,
        log_format=log_format,
        log_level=log_level,
        plain=plain,
    )
    started = start.validate()
    if print_config:
        typer.echo(text.decode(), nl=False)
        return

    def shown(addresses: ServerAddresses) -> str:
        return f"gorgo serve listening on {addresses.data_url} (admin {addresses.admin_url})"

    from gorgo.proxy.server import serve as run_proxy

    if worker is not None:
        start.run_worker(*worker, run_proxy)
        return
    if takeover and inherited is None:
        from gorgo.live.workers.parent import inherit

        inherited = inherit(started.config.proxy.admin_bind)
    number = launch.processes_of(processes, started.config)
    if number == 1 and inherited is None:
        start.run(started, run_proxy, shown)
    else:
        start.run_parent(started, shown, processes=number, inherited=inherited)


def _chosen(context: typer.Context, replicas: list[str] | None) -> bool:
    """Return whether replicas are given by URL. Both they and a file on the command line are a usage error."""
    by_file, by_url = (str(context.get_parameter_source(name)) for name in ("config", "replica"))
    if not replicas:
        if "COMMANDLINE" in str(context.get_parameter_source("engine")):
            raise typer.BadParameter(
                "--engine: expected --replica beside it; in a file, `engine` is a key of a replica"
            )
        return False
    if "COMMANDLINE" in by_file and "COMMANDLINE" in by_url:
        raise typer.BadParameter("--config and --replica: expected one of them")
    return "COMMANDLINE" not in by_file


def _address(option: str, value: str | None) -> str | None:
    from gorgo.config.values import checked_bind

    try:
        return None if value is None else checked_bind(value)
    except ValueError as error:
        raise typer.BadParameter(f"{option}: expected {error}") from error


def picker(
    config: options.Config = options.REGIONS_YAML,
    print_envoy: Annotated[
        bool, typer.Option("--print-envoy", help="Print the configuration of an Envoy before it, and exit.")
    ] = False,
    policy: launch.PolicyName = None,
    weights: options.Weights = None,
    state: launch.StateFile = None,
    request_log: launch.RequestLog = None,
    outcome_log: launch.OutcomeLog = None,
    seed: options.MaybeSeed = None,
    log_format: options.LogFormat = "json",
    log_level: options.LogLevel = "info",
) -> None:
    """Run the endpoint picker: Envoy carries requests and replies, and asks it for a replica per request.

    It serves ext_proc, the access log and health by gRPC on `picker.bind`. SIGTERM lets replies in flight finish.
    """
    from gorgo.cli.validation import Overrides
    from gorgo.config.load import read_text
    from gorgo.picker.envoy import envoy_yaml
    from gorgo.picker.server import serve as run_picker

    start = launch.Launch(
        config=config,
        text=read_text(config),
        overrides=Overrides(
            environ=os.environ,
            admin_token=options.admin_token(),
            metrics_token=options.metrics_token(),
            policy=policy,
            weights_file=weights,
            front_end="picker",
            ports=not print_envoy,
        ),
        state=state,
        request_log=request_log,
        outcome_log=outcome_log,
        seed=seed,
        log_format=log_format,
        log_level=log_level,
    )
    started = start.validate()
    if print_envoy:
        typer.echo(envoy_yaml(started.config), nl=False)
        return

    def shown(addresses: ServerAddresses) -> str:
        host, port = addresses.data
        return f"gorgo picker listening on {host}:{port} (admin {addresses.admin_url})"

    start.run(started, run_picker, shown)
