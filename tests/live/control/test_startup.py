"""What wins at a start: the state file or the configuration."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gorgo.config.model import Config, LimitsConfig, ProxyConfig, RegionConfig, ReplicaConfig
from gorgo.core.policy.weights import Weights
from gorgo.errors import ConfigError
from gorgo.live.control.startup import InitialState, initial_state
from gorgo.live.control.state_file import ConfigSnapshot, Frozen, PersistedState
from gorgo.policies.registry import make_policy

FROZEN = Frozen("2026-04-01T12:00:00+00:00")


def config(policy: str = "gorgo", weights: dict[str, float] | None = None, draining: str = "") -> Config:
    rows = tuple(ReplicaConfig(name=name, region="x", url="http://h", draining=name in draining) for name in "abc")
    proxy = ProxyConfig(region="x", policy=policy, weights=weights or {})
    return Config(proxy=proxy, regions=(RegionConfig(name="x"),), replicas=rows, limits=LimitsConfig())


def kept(before: Config, **changes: Any) -> PersistedState:
    """As a proxy that ran by `before` left it."""
    same = PersistedState(
        policy="gorgo",
        weights={"w_rtt": 0.7, "w_queue": 0.2},
        version=9,
        frozen=None,
        draining=frozenset(),
        configured=ConfigSnapshot.by(before),
    )
    return replace(same, **changes)


def started(found: PersistedState | None, now: Config) -> InitialState:
    policy = make_policy(now.proxy.policy)
    return initial_state(
        found, now, policy, Weights.of(policy.weight_specs, now.proxy.weights, version=1), source="state"
    )


def test_without_a_state_the_configuration_holds() -> None:
    start = started(None, config(weights={"w_rtt": 0.6}, draining="b"))
    assert (start.weights["w_rtt"], start.weights.version, start.draining) == (0.6, 1, frozenset("b"))
    assert (start.frozen, start.source) == (None, "configuration")


def test_what_was_set_live_holds_while_the_configuration_says_the_same() -> None:
    start = started(kept(config()), config())
    assert (dict(start.weights), start.weights.version) == ({"w_rtt": 0.7, "w_queue": 0.2}, 9)
    assert start.source == "state"


def test_defaults_spelt_out_are_no_edit() -> None:
    assert started(kept(config()), config(weights={"w_rtt": 0.5, "w_queue": 0.1})).source == "state"


@pytest.mark.parametrize("edited", [config(weights={"w_rtt": 0.6}), config("nearest")])
def test_edited_configuration_holds_under_a_new_version(edited: Config) -> None:
    start = started(kept(config()), edited)
    assert (start.policy.name, start.weights.version, start.source) == (edited.proxy.policy, 10, "configuration")


def test_edit_to_what_is_in_force_needs_no_new_version() -> None:
    start = started(kept(config()), config(weights={"w_rtt": 0.7, "w_queue": 0.2}))
    assert start.weights.version == 9


def test_frozen_weights_hold_whatever_the_configuration_says() -> None:
    for now in (config(), config(weights={"w_rtt": 0.6}), config("nearest")):
        start = started(kept(config(), frozen=FROZEN), now)
        assert (start.policy.name, start.weights["w_rtt"], start.weights.version) == ("gorgo", 0.7, 9)
        assert start.frozen == FROZEN


def test_weights_that_were_set_outside_the_box_come_back() -> None:
    assert started(kept(config(), weights={"w_rtt": 9.0, "w_queue": 0.0}), config()).weights["w_rtt"] == 9.0


def test_weight_that_the_policy_got_since_is_at_its_default() -> None:
    assert started(kept(config(), weights={"w_rtt": 0.7}), config()).weights["w_queue"] == 0.1


def test_each_drain_mark_holds_until_the_configuration_changes_its_own() -> None:
    left = kept(config(draining="c"), draining=frozenset({"a", "gone"}))  # live: a marked, c's mark taken off
    assert started(left, config(draining="c")).draining == {"a"}
    assert started(left, config(draining="ac")).draining == {"a"}
    assert started(left, config(draining="b")).draining == {"a", "b"}
    assert started(left, config()).draining == {"a"}


@pytest.mark.parametrize("changes", [{"policy": "gone"}, {"weights": {"gone": 1.0}}])
def test_state_that_cannot_be_had_any_more_is_an_error(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"^state: its policy or weights are invalid: .*gone.*move the file away"):
        started(kept(config(), frozen=FROZEN, **changes), config())
