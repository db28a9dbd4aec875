"""Settings of a Router on their own: what each of them changes in the parts that use it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gorgo.core.limits import RouterLimits
from gorgo.core.policy.weights import Weights
from gorgo.core.router_parts import RouterSettings
from gorgo.errors import ConfigError
from gorgo.policies.registry import make_policy
from tests.core.parts import Parts, make_parts
from tests.core.routers import a_request
from tests.core.training.learners import LeastPredicted


def settings_of(parts: Parts, applied: list[RouterLimits] | None = None) -> RouterSettings:
    return RouterSettings(
        parts.dispatcher,
        parts.learning,
        parts.table,
        parts.index,
        parts.feeds,
        parts.admission,
        limits=RouterLimits(),
        apply_limits=([] if applied is None else applied).append,
    )


def test_weights_are_those_of_the_next_decision() -> None:
    parts = make_parts("a", policy="gorgo")
    settings = settings_of(parts)
    weights = settings.weights.changed(settings.policy.weight_specs, {"w_rtt": 1.0})
    settings.set_weights(weights, now=1.0)
    assert settings.weights is weights
    assert parts.dispatch(a_request(), now=1.0).decision.weights_version == 2


def test_another_policy_decides_next_reads_its_own_index_and_drains_the_queue() -> None:
    parts = make_parts("a", policy="gorgo-ms")
    settings = settings_of(parts)
    policy = make_policy("gorgo")
    settings.set_policy(policy, Weights.of(policy.weight_specs, version=5), now=1.0)
    assert (settings.policy, settings.weights.version) == (policy, 5)
    assert (parts.index.bounded, parts.feeds.used, parts.admission.needs_drain) == (False, False, True)
    assert parts.dispatch(a_request(), now=1.0).decision.policy == "gorgo"


def test_a_policy_of_another_index_than_the_shadow_is_refused_and_changes_nothing() -> None:
    parts = make_parts("a", policy="gorgo")
    settings = settings_of(parts)
    settings.set_shadow(make_policy("gorgo"), now=0.0)
    before, weights = settings.policy, settings.weights
    other = make_policy("gorgo-ms")
    with pytest.raises(ConfigError, match="index"):
        settings.validate_policy(other)
    with pytest.raises(ConfigError, match="index"):
        settings.set_policy(other, Weights.of(other.weight_specs, version=2), now=0.0)
    assert (settings.policy, settings.weights) == (before, weights)
    assert not parts.admission.needs_drain
    settings.set_shadow(None, now=0.0)
    settings.validate_policy(other)
    assert settings.shadow is None


def test_a_policy_that_learns_counts_progress_and_one_that_does_not_no_longer_does() -> None:
    parts = make_parts("a")
    settings = settings_of(parts)
    learner, plain = LeastPredicted(), make_policy("nearest")
    for policy in (learner, plain, learner):
        settings.set_policy(policy, Weights.of(policy.weight_specs, version=2), now=0.0)
        assert (parts.fleet.member("a").token_gap is not None) == (policy is learner)


def test_limits_are_handed_to_the_parts_and_read_back() -> None:
    applied: list[RouterLimits] = []
    settings = settings_of(make_parts("a"), applied)
    limits = replace(settings.limits, max_in_flight=1)
    settings.set_limits(limits, now=0.0)
    assert (applied, settings.limits) == ([limits], limits)
