"""Packages that a part of the configuration needs and the proxy runs without: whether each is installed, and the error.

Nothing here imports one of them, but `require_tracing`, which is called only if `proxy.tracing` names a collector.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from importlib.util import find_spec

from gorgo.config.fleet import FleetSourceConfig, ReplicaConfig
from gorgo.errors import InvalidValueError, MissingExtra


@dataclass(frozen=True, slots=True)
class Extra:
    """One extra of the project.

    Parameters
    ----------
    name, package:
        Its name, and the package by which one sees that it is installed.
    need:
        Who needs it, with the verb.
    """

    name: str
    package: str
    need: str

    @property
    def missing(self) -> str:
        """What to say where it is not installed."""
        return f"{self.need} the extra: pip install 'gorgo-router[{self.name}]'"

    @property
    def expected(self) -> str:
        """What was expected, for an error of the configuration."""
        return f"the extra {self.name} to be installed"


EVENTS = Extra("events", "zmq", "KV events need")
SHARED = Extra("shared", "redis", "a store needs")
DNS = Extra("dns", "dns", "SRV records need")


def is_installed(extra: Extra) -> bool:
    """Return whether the package of an extra is installed."""
    return find_spec(extra.package) is not None


def check_extras(replicas: Iterable[ReplicaConfig], sources: Iterable[FleetSourceConfig] = ()) -> None:
    """Raise `InvalidValueError` if a replica or a fleet source needs an extra that is not installed."""
    for replica in replicas:
        if replica.kv_events is not None and not is_installed(EVENTS):
            raise InvalidValueError(f"replica {replica.name!r}, kv_events", EVENTS.missing, EVENTS.expected)
    for source in sources:
        if source.reads_srv_records and not is_installed(DNS):
            raise InvalidValueError(f"fleet source {source.name!r}, host", DNS.missing, DNS.expected)


def require_tracing() -> None:
    """Raise `MissingExtra` without the extra `otel`."""
    try:
        import opentelemetry.exporter.otlp.proto.http.trace_exporter
        import opentelemetry.sdk.trace  # noqa: F401
    except ModuleNotFoundError as error:
        raise MissingExtra(
            f"proxy.tracing needs {error.name}, which is not installed: pip install 'gorgo-router[otel]'"
        ) from error
