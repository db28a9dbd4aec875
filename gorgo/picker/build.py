"""The wiring of one picker: what routes, and what decides for Envoy above it."""

from __future__ import annotations

import ssl
from collections.abc import Mapping

from gorgo.config.model import Config
from gorgo.core.policy.interface import Policy
from gorgo.core.policy.weights import Weights
from gorgo.live.build import build_live
from gorgo.live.control.state_file import PersistedState, StateFile
from gorgo.picker.state import HOLD_S, PickerState


def build_picker(
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
    hold_s: float = HOLD_S,
) -> PickerState:
    """Wire a picker. Parameters as in `build_live`; `hold_s` is the longest time of a request in the queue."""
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
    return PickerState.serving(live, hold_s=hold_s)
