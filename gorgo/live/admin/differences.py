"""Differences of a running proxy from regions.yaml: policy, weights, drain marks, and keys that need a restart."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from operator import attrgetter

from gorgo.config.model import SharedConfig
from gorgo.live.state import LiveState

_LIVE = "set at run time; an edit of the file replaces it"
_RESTART = "needs a restart"
#: Keys that are read once, below `proxy`.
_BOUND = ("bind", "admin_bind", "tracing.endpoint", "tracing.sample_ratio")
#: And below `picker`, for `gorgo picker`.
_PICKER = ("bind", "tls.cert", "tls.key", "hold_s")

Value = str | float | bool | None


@dataclass(frozen=True, slots=True)
class Difference:
    """One key whose value in force is not that of the file."""

    key: str
    in_file: Value
    in_force: Value
    why: str
    #: An edit of the file is not in force, as opposed to a change at run time.
    waits: bool = False

    def __str__(self) -> str:
        return f"{self.key} is {_shown(self.in_force)}, in regions.yaml {_shown(self.in_file)}: {self.why}"


def differences(state: LiveState) -> list[Difference]:
    """Return all differences, those that wait first."""
    found = [*_routing(state), *_drain_marks(state), *_restart(state)]
    return sorted(found, key=lambda difference: not difference.waits)


def _routing(state: LiveState) -> Iterator[Difference]:
    router, control, file = state.routing.router, state.routing.control, state.file_config.proxy
    waits = control.file.pending is not None
    why = "frozen; `gorgo unfreeze` applies the file" if waits else _LIVE if control.frozen is None else "frozen"
    if router.settings.policy.name != file.policy:
        yield Difference("proxy.policy", file.policy, router.settings.policy.name, why, waits)
    else:
        for spec in router.settings.policy.weight_specs:
            configured, running = file.weights.get(spec.name, spec.default), router.settings.weights[spec.name]
            if configured != running:
                yield Difference(f"proxy.weights.{spec.name}", configured, running, why, waits)
    shadow = None if router.settings.shadow is None else router.settings.shadow.name
    if shadow != file.shadow_policy:
        yield Difference("proxy.shadow_policy", file.shadow_policy, shadow, "does not fit the policy in force", True)


def _drain_marks(state: LiveState) -> Iterator[Difference]:
    marked = state.routing.router.view.draining()
    for replica in state.file_config.replicas:
        draining = replica.name in marked
        if draining != replica.draining and replica.name in state.replicas.targets:
            yield Difference(f"replicas.{replica.name}.draining", replica.draining, draining, _LIVE)


def _restart(state: LiveState) -> Iterator[Difference]:
    file, running = state.file_config.proxy, state.config.proxy
    for key in _BOUND:
        in_file, in_force = attrgetter(key)(file), attrgetter(key)(running)
        if in_file != in_force:
            yield Difference(f"proxy.{key}", in_file, in_force, _RESTART, True)
    if (file.tls.cert is None) != (running.tls.cert is None):
        yield Difference("proxy.tls.cert", file.tls.cert, running.tls.cert, _RESTART, True)
    for key in _PICKER:
        in_file, in_force = (attrgetter(key)(each.picker) for each in (state.file_config, state.config))
        if in_file != in_force:
            yield Difference(f"picker.{key}", in_file, in_force, _RESTART, True)
    for shared in fields(SharedConfig):
        in_file, in_force = (getattr(each.shared, shared.name, None) for each in (state.file_config, state.config))
        if in_file != in_force:
            yield Difference(f"shared.{shared.name}", in_file, in_force, _RESTART, True)


def _shown(value: Value) -> str:
    if isinstance(value, bool) or value is None:
        return {True: "true", False: "false", None: "not set"}[value]
    return f"{value:g}" if isinstance(value, float) else value
