"""The wiring of one proxy: what routes, and what serves HTTP above it."""

from __future__ import annotations

import ssl
from collections.abc import Mapping

from gorgo.config.model import Config
from gorgo.core.policy.interface import Policy
from gorgo.core.policy.weights import Weights
from gorgo.live.build import build_live
from gorgo.live.control.state_file import PersistedState, StateFile
from gorgo.proxy.state import RunningProxy


def build_proxy(
    config: Config,
    *,
    policy: Policy,
    weights: Weights | None,
    environ: Mapping[str, str],
    key: int,
    seed: int,
    state_file: StateFile | None = None,
    persisted: PersistedState | None = None,
    tls: ssl.SSLContext | None = None,
) -> RunningProxy:
    """Wire a proxy. Parameters as in `build_live`."""
    live = build_live(
        config,
        policy=policy,
        weights=weights,
        environ=environ,
        key=key,
        seed=seed,
        state_file=state_file,
        persisted=persisted,
        tls=tls,
    )
    return RunningProxy.serving(live)
