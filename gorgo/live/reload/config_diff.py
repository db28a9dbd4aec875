"""The difference of two configurations, by the changes it needs in a running proxy. Pure.

Only keys that differ between the two files count. Live changes of weights, policy and drain marks therefore hold until
the file itself changes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from gorgo.config.model import Config, ReplicaConfig

#: Sockets and the exporter are made once. So is the store's client: another group has another fingerprint key.
_BOUND = ("bind", "admin_bind", "tracing")
#: Sections that are read once.
_RESTART = ("shared", "picker")
_INTERVALS = ("probe_interval_s", "scrape_interval_s")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigDiff:
    """The difference, by kind of change."""

    added: tuple[ReplicaConfig, ...] = ()
    #: The same name with another URL, engine or TLS file: another process, with new state.
    replaced: tuple[ReplicaConfig, ...] = ()
    #: The same process with other models, region, key, capacity or usage.
    updated: tuple[ReplicaConfig, ...] = ()
    removed: tuple[str, ...] = ()
    #: Drain marks to set or remove.
    drains: Mapping[str, bool] = field(default_factory=dict)
    policy: bool = False
    weights: bool = False
    shadow: bool = False
    #: Aliases or regions of models.
    models: bool = False
    intervals: bool = False
    #: Other changed keys; in force at once.
    settings: tuple[str, ...] = ()
    #: Changed keys that need a restart.
    restart: tuple[str, ...] = ()
    #: Changed keys that the proxy does not follow now, with the reason.
    not_in_force: Mapping[str, str] = field(default_factory=dict)

    @property
    def fleet(self) -> bool:
        return bool(self.added or self.replaced or self.updated or self.removed)

    def as_log(self) -> dict[str, Any]:
        """Return the fields of the log event, empty ones left out."""
        fields: dict[str, Any] = {
            kind: [replica.name for replica in getattr(self, kind)] for kind in ("added", "replaced", "updated")
        }
        fields |= {"removed": list(self.removed), "drains": dict(self.drains)}
        # Other weights come with another policy.
        routed = {"proxy.policy", "proxy.weights"} if self.not_in_force else set()
        fields |= {"settings": [key for key in self.settings if key not in routed]}
        fields |= {"not_in_force": dict(self.not_in_force), "restart_needed": list(self.restart)}
        return {key: value for key, value in fields.items() if value}


def diff(old: Config, new: Config) -> ConfigDiff:
    """Return the changes from the running `old` to `new`."""
    before = {replica.name: replica for replica in old.replicas}
    after = {replica.name: replica for replica in new.replicas}
    stay = [(before[name], replica) for name, replica in after.items() if name in before]
    sections = ("proxy", "clients", "limits", "overload")
    settings = [key for name in sections for key in _differ(getattr(old, name), getattr(new, name), name)]
    settings += [key for key in ("regions", "models", "fleet_sources") if getattr(old, key) != getattr(new, key)]
    settings += [key for key in _RESTART if getattr(old, key) != getattr(new, key)]
    restart = (*(f"proxy.{key}" for key in (*_BOUND, *_tls_toggled(old, new))), *_RESTART)
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
        models=old.models != new.models,
        shadow=old.proxy.shadow_policy != new.proxy.shadow_policy,
        intervals=any(getattr(old.proxy, key) != getattr(new.proxy, key) for key in _INTERVALS),
        settings=tuple(key for key in settings if key not in restart),
        restart=tuple(key for key in settings if key in restart),
    )


def keep_restart_only(running: Config, new: Config) -> Config:
    """Return `new` with the restart-only keys of `running`, so that the next diff names them again."""
    retained = (*_BOUND, *_tls_toggled(running, new))
    proxy = replace(new.proxy, **{key: getattr(running.proxy, key) for key in retained})
    return replace(new, proxy=proxy, **{key: getattr(running, key) for key in _RESTART})


def _tls_toggled(old: Config, new: Config) -> tuple[str, ...]:
    """Return `tls` if TLS for clients is turned on or off; another certificate needs no restart."""
    return ("tls",) if (old.proxy.tls.cert is None) != (new.proxy.tls.cert is None) else ()


def _process(replica: ReplicaConfig) -> tuple[str | None, ...]:
    # Open connections use the old files.
    return replica.url.rstrip("/"), replica.engine, replica.ca_file, replica.client_cert, replica.client_key


def _without_drain(replica: ReplicaConfig) -> ReplicaConfig:
    """Return the entry without its drain mark, which is compared apart."""
    return replace(replica, draining=False)


def _drains(before: Mapping[str, ReplicaConfig], after: Mapping[str, ReplicaConfig]) -> dict[str, bool]:
    marked = {name: before[name].draining if name in before else False for name in after}
    return {name: replica.draining for name, replica in after.items() if replica.draining != marked[name]}


def _differ(old: Any, new: Any, section: str) -> list[str]:
    return [f"{section}.{key}" for key in new.__dataclass_fields__ if getattr(old, key) != getattr(new, key)]
