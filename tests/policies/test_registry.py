from __future__ import annotations

from importlib.metadata import EntryPoint, EntryPoints

import pytest

from gorgo.errors import ConfigError, UnknownPolicy
from gorgo.policies import registry
from gorgo.policies.registry import POLICIES, make_policy, make_shadow, policy_names


def test_holds_the_policies_of_the_design() -> None:
    assert set(POLICIES) == {
        "gorgo", "gorgo-ms", "least-load", "least-request", "prefix-cache", "simple-session-affinity", "random",
        "round-robin", "power-of-two", "nearest", "prefix-cache-and-load", "prefix-threshold",
    }  # fmt: skip


def test_each_call_makes_a_new_instance() -> None:
    assert make_policy("round-robin") is not make_policy("round-robin")


def test_an_unknown_name_is_answered_with_the_names_that_there_are() -> None:
    with pytest.raises(UnknownPolicy, match=r"'fastest'.*; there are: gorgo, gorgo-ms, least-load"):
        make_policy("fastest")


def test_a_shadow_is_made_by_name_where_it_can_score_the_policy() -> None:
    assert make_shadow(None, make_policy("gorgo")) is None
    shadow = make_shadow("nearest", make_policy("gorgo"))
    assert shadow is not None
    assert shadow.name == "nearest"
    with pytest.raises(ConfigError, match="'random' has no cost"):
        make_shadow("random", make_policy("gorgo"))
    with pytest.raises(UnknownPolicy):
        make_shadow("fastest", make_policy("gorgo"))


@pytest.fixture
def offered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another package's entry points: a policy of its own, one that is none, and one that takes a name from here."""
    found = EntryPoints(
        EntryPoint(name, value, registry.ENTRY_POINTS)
        for name, value in {
            "others": "gorgo.policies.nearest:Nearest",
            "broken": "builtins:dict",
            "gorgo": "gorgo.policies.random:Random",
        }.items()
    )
    monkeypatch.setattr(registry, "entry_points", lambda *, group: found.select(group=group))


@pytest.mark.usefixtures("offered")
def test_another_package_can_add_a_policy_but_not_replace_one() -> None:
    assert make_policy("others").name == "nearest"
    assert make_policy("gorgo").name == "gorgo"
    assert policy_names() == [*POLICIES, "broken", "others"]


@pytest.mark.usefixtures("offered")
def test_an_entry_point_that_is_no_policy_is_named() -> None:
    with pytest.raises(UnknownPolicy, match="builtins:dict of the entry point 'broken'"):
        make_policy("broken")
