"""What a new configuration asks of a proxy that runs by an old one. Pure.

Owns the comparison; carrying it out is `reload`'s. Only what differs between the two files counts, so that what an
operator or a tuner has set since (weights, policy, a drain) stands until the file itself says something else about it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from gorgo.config.model import Config, ReplicaConfig

#: Sockets are bound once, and one exporter is made.
_BOUND = ("bind", "admin_bind", "tracing")
_INTERVALS = ("probe_interval_s", "scrape_interval_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigDiff:
    """The difference, by what has to be done about it."""

    added: tuple[ReplicaConfig, ...] = ()
    #: Of the same name, but another process: another URL or engine. Nothing known of the old one holds for it.
    replaced: tuple[ReplicaConfig, ...] = ()
    #: The same process, about which the file says something else (models, region, key, capacity, usage).
    updated: tuple[ReplicaConfig, ...] = ()
    removed: tuple[str, ...] = ()
    #: Drain marks to set or take off.
    drains: Mapping[str, bool] = field(default_factory=dict)
    policy: bool = False
    weights: bool = False
    shadow: bool = False
    intervals: bool = False
    #: Other keys of `proxy`, `regions`, `clients`, `models`, `limits` and `overload` that differ; all followed at once.
    settings: tuple[str, ...] = ()
    #: Keys that differ from what the process was started with and need a new start.
    restart: tuple[str, ...] = ()

    @property
    def fleet(self) -> bool:
        return bool(self.added or self.replaced or self.updated or self.removed)

    def as_log(self) -> dict[str, Any]:
        """What is to be told, without the empty parts."""
        told: dict[str, Any] = {
            kind: [replica.name for replica in getattr(self, kind)] for kind in ("added", "replaced", "updated")
        }
        told |= {"removed": list(self.removed), "drains": dict(self.drains)}
        told |= {"settings": list(self.settings), "restart_needed": list(self.restart)}
        return {key: value for key, value in told.items() if value}


def diff(old: Config, new: Config) -> ConfigDiff:
    """From `old`, by which the proxy runs, to `new`."""
    before = {replica.name: replica for replica in old.replicas}
    after = {replica.name: replica for replica in new.replicas}
    stay = [(before[name], replica) for name, replica in after.items() if name in before]
    sections = ("proxy", "clients", "limits", "overload")
    settings = [key for name in sections for key in _differ(getattr(old, name), getattr(new, name), name)]
    settings += [key for key in ("regions", "models") if getattr(old, key) != getattr(new, key)]
    restart = tuple(f"proxy.{key}" for key in (*_BOUND, *_tls_toggled(old, new)))
    return ConfigDiff(
        added=tuple(replica for name, replica in after.items() if name not in before),
        replaced=tuple(now for was, now in stay if _process(was) != _process(now)),
        updated=tuple(
            now for was, now in stay if _process(was) == _process(now) and _without_drain(was) != _without_drain(now)
        ),
        removed=tuple(name for name in before if name not in after),
        drains=_drains(before, after),
        policy=old.proxy.policy != new.proxy.policy,
        weights=dict(old.proxy.weights) != dict(new.proxy.weights),
        shadow=old.proxy.shadow_policy != new.proxy.shadow_policy,
        intervals=any(getattr(old.proxy, key) != getattr(new.proxy, key) for key in _INTERVALS),
        settings=tuple(key for key in settings if key not in restart),
        restart=tuple(key for key in settings if key in restart),
    )


def keep_restart_only(running: Config, new: Config) -> Config:
    """`new` with what only a new start can change as it is in `running`, so that the next comparison says so again."""
    kept = (*_BOUND, *_tls_toggled(running, new))
    return replace(new, proxy=replace(new.proxy, **{key: getattr(running.proxy, key) for key in kept}))


def _tls_toggled(old: Config, new: Config) -> tuple[str, ...]:
    """TLS for clients, if it goes on or off; another certificate is no such change."""
    return ("tls",) if (old.proxy.tls.cert is None) != (new.proxy.tls.cert is None) else ()


def _process(replica: ReplicaConfig) -> tuple[str | None, ...]:
    # Connections are opened as whom and to whom the files say.
    return replica.url.rstrip("/"), replica.engine, replica.ca_file, replica.client_cert, replica.client_key


def _without_drain(replica: ReplicaConfig) -> ReplicaConfig:
    """Everything but the drain mark, which has its own way."""
    return replace(replica, draining=False)


def _drains(before: Mapping[str, ReplicaConfig], after: Mapping[str, ReplicaConfig]) -> dict[str, bool]:
    marked = {name: before[name].draining if name in before else False for name in after}
    return {name: replica.draining for name, replica in after.items() if replica.draining != marked[name]}


def _differ(old: Any, new: Any, section: str) -> list[str]:
    return [f"{section}.{key}" for key in new.__dataclass_fields__ if getattr(old, key) != getattr(new, key)]
