"""One entry of `replicas`."""

from __future__ import annotations

from dataclasses import dataclass, field

from gorgo.config.fleet.kv_events import KvEvents
from gorgo.config.values import Count, EngineName, EnvironmentName, FilePath, Name, Positive, Text, Url, strict


@strict
@dataclass(frozen=True, slots=True, kw_only=True)
class CapacityConfig:
    """Priors of a replica's size, which the engine's report replaces, and of its prefill speed, which is learned."""

    kv_tokens: Count | None = None
    max_running_requests: Count | None = None
    prefill_tokens_per_s: Positive | None = None


@strict
@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaConfig:
    """One engine process at a URL."""

    name: Name
    region: Name
    url: Url
    engine: EngineName = "sglang"
    #: Models served; empty means any.
    models: tuple[Text, ...] = ()
    accelerator: Text | None = None
    #: Environment variable with the API key; the key itself is never in the file.
    api_key_env: EnvironmentName | None = None
    #: That of the token by which its engine may push what is cached.
    push_token_env: EnvironmentName | None = None
    #: Request `usage` in every stream and remove the extra chunk.
    request_usage: bool = False
    #: Trusted authorities instead of the system's, and the client certificate of the proxy.
    ca_file: FilePath | None = None
    client_cert: FilePath | None = None
    client_key: FilePath | None = None
    #: No new requests. A change of this key overrides the mark of an operator.
    draining: bool = False
    capacity: CapacityConfig = field(default_factory=CapacityConfig)
    #: Off by default; needs the extra `events`.
    kv_events: KvEvents | None = None
