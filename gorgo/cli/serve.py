"""`gorgo serve`: the regional proxy."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gorgo.cli import options

if TYPE_CHECKING:
    from gorgo.config.model import Config


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
    policy: Annotated[str | None, typer.Option(metavar="NAME", help="Routing policy; see `gorgo policies`.")] = None,
    weights: options.Weights = None,
    state: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            show_default=False,
            help="File that keeps freeze, weights, policy, drain marks and registered replicas.",
        ),
    ] = None,
    request_log: Annotated[
        Path | None,
        typer.Option(metavar="FILE", show_default=False, help="Append a line per finished request, without its text."),
    ] = None,
    outcome_log: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", show_default=False, help="Append a line per attempt with all candidates, for `gorgo learn`."
        ),
    ] = None,
    seed: options.MaybeSeed = None,
    log_format: options.LogFormat = "json",
    log_level: options.LogLevel = "info",
) -> None:
    """Run the regional proxy.

    Clients use the OpenAI or SGLang API; the proxy chooses a replica per request. SIGTERM lets running streams finish.
    """
    import secrets

    import uvloop

    from gorgo.cli.validation import Overrides, validate
    from gorgo.config.from_urls import config_text
    from gorgo.config.load import read_text
    from gorgo.live import gc_tuning
    from gorgo.live.control.state_file import StateFile
    from gorgo.live.logs import log_config_warnings, set_up_logs
    from gorgo.live.reload.file_watch import ConfigFile
    from gorgo.proxy.http.sockets import ServerAddresses
    from gorgo.proxy.server import serve as run_proxy

    token = options.admin_token()
    overrides = Overrides(
        environ=os.environ,
        admin_token=token,
        policy=policy,
        weights_file=weights,
        bind=_address("--bind", bind),
        admin_bind=_address("--admin-bind", admin_bind),
    )
    if _chosen(context, replica):
        config = Path("--replica")
        proxy = {"policy": policy, "bind": bind, "admin_bind": admin_bind}
        text = config_text(replica or (), engine=engine, proxy=proxy, environ=os.environ).encode()
    else:
        text = read_text(config, expected="a regions.yaml file, or gorgo serve --replica URL")
    started = validate(text, source=config, overrides=overrides)
    # A weights file is read once and takes precedence over regions.yaml at each reload too. Addresses need a restart.
    pinned = None if weights is None else (started.policy, started.weights)
    at_reload = replace(overrides, weights_file=None, pinned=pinned, ports=False)

    def parse(text: bytes) -> Config:
        """Return the configuration with the options of the command line, at each reload."""
        return validate(text, source=config, overrides=at_reload).config

    if print_config:
        typer.echo(text.decode(), nl=False)
        return
    if token is None:
        typer.echo("gorgo: GORGO_ADMIN_TOKEN is not set: the admin listener will reject every request", err=True)

    def ready(addresses: ServerAddresses) -> None:
        gc_tuning.freeze_startup_objects()
        typer.echo(f"gorgo serve listening on {addresses.data_url} (admin {addresses.admin_url})")

    set_up_logs(log_format, log_level)
    log_config_warnings(started.config)
    # With --seed the key of fingerprints repeats too, for comparisons; without, clients cannot guess it.
    drawn = secrets.randbits(63) if seed is None else seed
    # The proxy handles the signals itself: a second one ends its grace period.
    uvloop.run(
        run_proxy(
            started.config,
            policy=started.policy,
            weights=started.weights,
            admin_token=token,
            environ=os.environ,
            key=drawn,
            seed=drawn,
            # A pipe can be read only once.
            file=ConfigFile(config, parse, text) if config.is_file() else None,
            state_file=None if state is None else StateFile(state),
            request_log=request_log,
            outcome_log=outcome_log,
            ready=ready,
        )
    )


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
    from gorgo.config.addresses import checked_bind

    try:
        return None if value is None else checked_bind(value)
    except ValueError as error:
        raise typer.BadParameter(f"{option}: expected {error}") from error
