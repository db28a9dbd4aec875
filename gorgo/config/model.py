"""The shape of regions.yaml as frozen dataclasses: every key, its type, its default and its range.

Owns the data; `config.load` reads the text and makes the errors. Units are in the names; seconds inside except where a
key says `ms`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from pydantic import Field

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,62}$")]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
EngineName = Literal["sglang"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    """Priors of a replica's size; the engine's own report replaces them."""

    kv_tokens: Count | None = None
    max_running_requests: Count | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Replica:
    """One engine process at a URL."""

    name: Name
    region: Name
    url: str
    engine: EngineName = "sglang"
    models: tuple[str, ...] = ()
    accelerator: str | None = None
    api_key_env: str | None = None
    request_usage: bool = False
    capacity: Capacity = field(default_factory=Capacity)


@dataclass(frozen=True, slots=True, kw_only=True)
class Proxy:
    """The regional proxy itself."""

    region: Name
    policy: str = "gorgo"
    weights: Mapping[str, float] = field(default_factory=dict)
    bind: str = "127.0.0.1:8080"
    admin_bind: str = "127.0.0.1:9090"
    probe_interval_s: Positive = 30.0
    scrape_interval_s: Positive = 30.0
    #: A scrape or a ping older than this is stale; default three intervals.
    stale_after_s: Positive | None = None
    rtt_ewma_alpha: Annotated[float, Field(gt=0, le=1)] = 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Every bound that an operator can move, with the reason for its default in regions.yaml."""

    max_body_bytes: Count = 32 * 1024 * 1024
    max_attempts: Count = 3
    max_in_flight: Count = 4096
    connections_per_replica: Count = 1024
    connect_timeout_s: Positive = 5.0
    first_content_timeout_s: Positive = 120.0
    between_chunks_timeout_s: Positive = 60.0
    prefix_index_blocks: Count = 4_000_000
    shutdown_grace_s: NotNegative = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulation:
    """What `gorgo engine` and `gorgo demo` imitate."""

    #: Mean round trip from the proxy's region to each region.
    rtt_ms: Mapping[Name, NotNegative] = field(default_factory=dict)
    #: Mean of the exponential jitter added to each one-way trip, as a share of the RTT.
    jitter: Annotated[float, Field(ge=0, le=1)] = 0.02
    profile: str = "2xL40S-Qwen3.5-35B-A3B-FP8"
    seed: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """A place where replicas or clients are."""

    name: Name


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    """The whole of regions.yaml."""

    proxy: Proxy
    regions: tuple[Region, ...]
    replicas: tuple[Replica, ...]
    limits: Limits = field(default_factory=Limits)
    simulation: Simulation = field(default_factory=Simulation)
