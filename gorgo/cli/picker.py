"""`gorgo picker`: the endpoint picker behind Envoy."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Annotated

import typer

from gorgo.cli import launch, options

if TYPE_CHECKING:
    from gorgo.live.listener.sockets import ServerAddresses


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
