"""Parts of a new configuration that are made before it is applied; each may fail."""

from __future__ import annotations

import ssl

from gorgo.config.model import Config
from gorgo.core.policy.interface import Policy
from gorgo.core.policy.weights import Weights
from gorgo.live.http.tls import upstream_tls
from gorgo.policies.registry import make_policy


def tls_contexts(config: Config, shared: ssl.SSLContext) -> dict[str, ssl.SSLContext]:
    """Return the TLS context per replica. Reading authorities takes the time of a hundred stream events."""
    return {row.name: upstream_tls(row, shared) for row in config.replicas}


def file_policy(config: Config, running: Config) -> tuple[Policy, Weights]:
    """Return policy and complete weights of the file. Raises `UnknownPolicy` or `WeightsError`."""
    policy = make_policy(config.proxy.policy)
    # Weights of the start may come from a weights file with values out of range.
    known = (config.proxy.policy, config.proxy.weights) == (running.proxy.policy, running.proxy.weights)
    return policy, Weights.of(policy.weight_specs, config.proxy.weights, allow_out_of_range=known)
