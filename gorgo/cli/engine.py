"""`gorgo engine`: one simulated replica over HTTP."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gorgo.cli import options

if TYPE_CHECKING:
    from gorgo.config.fleet import ReplicaConfig
    from gorgo.config.model import Config
    from gorgo.lab.engine_server.cache_reports import PushTarget
    from gorgo.lab.sim.engine.profiles import EngineProfile


def engine(
    replica: Annotated[str, typer.Option(metavar="NAME", help="Replica of regions.yaml to simulate.")],
    config: options.Config = options.REGIONS_YAML,
    host: Annotated[str, typer.Option(help="Address to listen on.")] = "127.0.0.1",
    port: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=65535,
            show_default=False,
            help="Port to listen on; 0 takes a free one. Default: from the URL of the replica.",
        ),
    ] = None,
    kv_events: Annotated[
        str | None,
        typer.Option(
            "--kv-events",
            metavar="ENDPOINT",
            show_default=False,
            help="Publish KV cache events there, such as tcp://127.0.0.1:5557, and replays at the next port.",
        ),
    ] = None,
    push: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            show_default=False,
            help="Admin address of a proxy to push the cache to, with the token in the replica's push_token_env.",
        ),
    ] = None,
) -> None:
    """Run one simulated replica, with the interface of SGLang or, by its profile, of vLLM.

    It answers over HTTP with the simulated RTT of its region, and needs no GPU. Further models of the replica are
    listed as LoRA adapters of the first.
    """
    from gorgo.cli.app import run_until_stopped
    from gorgo.config.load import load_config
    from gorgo.lab.engine_server import run_engine
    from gorgo.lab.sim.fleet import profile_of

    loaded = load_config(config)
    spec = _replica(loaded, replica, source=config)
    simulation = loaded.simulation
    profile = profile_of(simulation, spec.name)
    _check_interface(spec, profile, source=config)

    events = None if kv_events is None else _kv_endpoint(kv_events)
    target = None if push is None else _push_target(spec, push, source=config)

    def ready(at_host: str, at_port: int) -> None:
        typer.echo(f"gorgo engine {replica} listening on http://{at_host}:{at_port}")

    run_until_stopped(
        lambda stop: run_engine(
            name=spec.name,
            profile=profile,
            rtt_ms=_rtt_ms(loaded, spec, source=config),
            seed=simulation.seed,
            host=host,
            port=_port_of(spec) if port is None else port,
            model=_base_model(spec),
            adapters=spec.models[1:],
            push=target,
            kv_events=events,
            notify=lambda line: typer.echo(f"gorgo engine {replica}: {line}", err=True),
            ready=ready,
            stop=stop,
        )
    )


def _replica(config: Config, name: str, *, source: Path) -> ReplicaConfig:
    from gorgo.errors import UnknownReplica

    for replica in config.replicas:
        if replica.name == name:
            return replica
    have = ", ".join(replica.name for replica in config.replicas)
    raise UnknownReplica(f"{source}: no replica named {name!r}; there are: {have}")


def _check_interface(replica: ReplicaConfig, profile: EngineProfile, *, source: Path) -> None:
    """Refuse to answer as vLLM for a router that would ask as SGLang's."""
    from gorgo.errors import ConfigError

    if profile.scheduler == "vllm" and replica.engine == "sglang":
        problem = f"replicas.{replica.name}.engine: sglang, but its profile {profile.name} simulates vLLM"
        raise ConfigError(f"{source}: {problem}; expected vllm or auto")


def _base_model(replica: ReplicaConfig) -> str:
    return replica.models[0] if replica.models else "gorgo-sim"


def _kv_endpoint(endpoint: str) -> str:
    from gorgo.config.values import checked_kv_endpoint

    try:
        # Port 0 takes a free one, which the engine announces.
        checked_kv_endpoint(endpoint.removesuffix(":0") + ":1" if endpoint.endswith(":0") else endpoint)
    except ValueError as error:
        raise typer.BadParameter(f"--kv-events: expected {error}") from error
    if not endpoint.startswith("tcp://"):
        raise typer.BadParameter("--kv-events: expected tcp://host:port: the next port has the replays")
    return endpoint


def _push_target(replica: ReplicaConfig, url: str, *, source: Path) -> PushTarget:
    """Return where to push. No model is named beside adapters: their prompts differ by their tokens."""
    import os

    from gorgo.config.values import checked_url
    from gorgo.errors import ConfigError
    from gorgo.lab.engine_server.cache_reports import PushTarget
    from gorgo.live.replica_secrets import push_token

    try:
        checked = checked_url(url)
    except ValueError as error:
        raise typer.BadParameter(f"--push: expected {error}") from error
    token = push_token(replica, os.environ)
    if token is None:
        problem = f"replicas.{replica.name}.push_token_env: missing"
        raise ConfigError(f"{source}: {problem}; expected the environment variable with the token for --push")
    model = None if len(replica.models) > 1 else _base_model(replica)
    return PushTarget(url=checked, replica=replica.name, model=model, token=token)


def _rtt_ms(config: Config, replica: ReplicaConfig, *, source: Path) -> float:
    from gorgo.errors import ConfigError

    rtt_ms = config.simulation.rtt_ms.get(replica.region)
    if rtt_ms is None:
        key = f"simulation.rtt_ms.{replica.region}"
        raise ConfigError(f"{source}: {key}: missing; expected the mean round trip to that region in ms")
    return rtt_ms


def _port_of(replica: ReplicaConfig) -> int:
    from urllib.parse import urlsplit

    parts = urlsplit(replica.url)
    return parts.port or (443 if parts.scheme == "https" else 80)
