"""What the core knows of a replica: identity, what it serves, priors of its size. No URL, no key."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ReplicaSpec:
    """One engine process, by name.

    Parameters
    ----------
    name:
        Unique in the fleet; identity is the name, never the URL.
    region:
        Where it is.
    models:
        Models that it serves; empty means any.
    kv_capacity_tokens, max_running_requests:
        Priors from regions.yaml; an engine's own report replaces them.
    prefill_base_s, prefill_tokens_per_s, prefill_kappa_s:
        Priors of the time of a prefill (`core.latency.prefill`); `None` is the default.
    tls:
        Whether connections to it are: a new one then takes a round trip more.
    accelerator:
        Name of its accelerator from regions.yaml; `None` is unknown.
    """

    name: str
    region: str
    models: tuple[str, ...] = ()
    kv_capacity_tokens: int | None = None
    max_running_requests: int | None = None
    prefill_base_s: float | None = None
    prefill_tokens_per_s: float | None = None
    prefill_kappa_s: float | None = None
    tls: bool = False
    accelerator: str | None = None
