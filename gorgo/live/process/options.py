"""What a process is started with, beside its configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from gorgo.core.policy.interface import Policy
from gorgo.core.policy.weights import Weights
from gorgo.live.control.state_file import StateFile
from gorgo.live.reload.file_watch import ConfigFile


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessOptions:
    """Options of a process.

    Parameters
    ----------
    policy, weights:
        The policy and its weights; its defaults if `weights` is `None`.
    admin_token:
        Required of admin calls; without it all are rejected.
    environ:
        Has the replicas' API keys.
    key:
        Key of the fingerprint; secret, or clients could craft prompts that collide.
    seed:
        Of the Router's random generator.
    file:
        Source of the configuration, reloaded when it changes and at SIGHUP.
    state_file:
        Stores weights, policy, freeze and drain marks; its content may override the configuration, `policy` and
        `weights` (`control.startup`).
    request_log:
        File of finished requests.
    outcome_log:
        File of ended attempts with the features of all candidates.
    """

    policy: Policy
    environ: Mapping[str, str]
    key: int
    seed: int
    weights: Weights | None = None
    admin_token: str | None = None
    file: ConfigFile | None = None
    state_file: StateFile | None = None
    request_log: Path | None = None
    outcome_log: Path | None = None
