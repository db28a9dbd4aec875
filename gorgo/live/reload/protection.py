"""Protection that a new configuration would take away: keys, rules and regions of clients and models. Pure.

A file that was cut while it was written is a valid file with fewer sections. So a reload that protects less is refused
unless the file says `clients: {open: true}`.
"""

from __future__ import annotations

from collections.abc import Iterator

from gorgo.config.model import ClientRuleConfig, Config
from gorgo.errors import ConfigError

_QUOTAS = ("max_in_flight", "requests_per_minute", "tokens_per_minute")


def refuse_loss(old: Config, new: Config) -> None:
    """Raise `ConfigError` if `new` protects less than the running `old` and does not say that it may."""
    lost = list(_lost(old, new))
    if lost and not new.clients.open:
        raise ConfigError(
            f"the file has less protection than the running configuration: without {', '.join(lost)}; "
            "if that is intended, add `open: true` to `clients`"
        )


def _lost(old: Config, new: Config) -> Iterator[str]:
    """Yield the keys of the configuration that protect in `old` and not in `new`."""
    if old.clients.keys_file is not None and new.clients.keys_file is None:
        yield "clients.keys_file"
    for quota in _QUOTAS:
        if getattr(old.clients, quota) and not getattr(new.clients, quota):
            yield f"clients.{quota}"
    rules = {rule.name: rule for rule in new.clients.rules}
    for rule in old.clients.rules:
        yield from _lost_of_rule(rule, rules.get(rule.name))
    regions = {model.name: model.allowed_regions for model in new.models}
    for model in old.models:
        if model.allowed_regions and not regions.get(model.name):
            yield f"allowed_regions of model {model.name!r}"


def _lost_of_rule(rule: ClientRuleConfig, now: ClientRuleConfig | None) -> Iterator[str]:
    if now is None:
        yield f"the rule of client {rule.name!r}"
        return
    for key in (*_QUOTAS, "allowed_regions"):
        if getattr(rule, key) and not getattr(now, key):
            yield f"{key} of client {rule.name!r}"
