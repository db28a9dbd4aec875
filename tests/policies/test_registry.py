from __future__ import annotations

from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import pytest

import gorgo.policies
from gorgo.errors import ConfigError, UnknownPolicy
from gorgo.policies import registry
from gorgo.policies.baselines import Nearest
from gorgo.policies.registry import POLICIES, make_policy, make_shadow, policy_names


def test_holds_the_policies_of_the_papers_and_the_baselines() -> None:
    assert list(POLICIES)[:6] == [
        "gorgo", "gorgo-ms", "least-load", "least-request", "prefix-cache", "simple-session-affinity",
    ]  # fmt: skip
    assert set(POLICIES) >= {"random", "round-robin", "power-of-two", "nearest", "prefix-threshold"}


@pytest.mark.parametrize(
    ("released", "ours"),
    [
        ("least-load", "least-load-first-token"),
        ("least-request", "least-request-in-flight"),
        ("prefix-cache", "prefix-cache-in-flight"),
    ],
)
def test_both_readings_of_a_baseline_stand_side_by_side_and_its_own_name_is_the_released_one(
    released: str, ours: str
) -> None:
    assert "as released" in POLICIES[released].summary
    assert POLICIES[ours].__module__ == POLICIES[released].__module__


def test_every_file_of_a_policy_is_registered() -> None:
    """A file without its line in the registry would be no policy, and no contract would test it."""
    folder = Path(gorgo.policies.__file__).parent
    modules = {path.stem for path in folder.rglob("*.py") if "name: ClassVar[str]" in path.read_text()} - {"base"}
    assert {kind.__module__.rpartition(".")[2] for kind in POLICIES.values()} == modules


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


class Others(Nearest):
    """A policy of another package."""

    name = "others"


class WithoutUnit:
    name, summary, weight_specs, index = "without-unit", "a rule", (), "any"

    def choose(self) -> None: ...


class OddIndex(Others):
    name, index = "odd-index", "bound"  # type: ignore[assignment]


OFFERED = {
    "others": f"{__name__}:Others",
    "broken": "builtins:dict",
    "without-unit": f"{__name__}:WithoutUnit",
    "odd-index": f"{__name__}:OddIndex",
    "other-name": f"{__name__}:Others",
    "no-module": "nowhere.at_all:Others",
    "no-class": f"{__name__}:Othrs",
    "gorgo": "gorgo.policies.baselines:Random",
}


@pytest.fixture
def offered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another package's entry points: a policy of its own, some that are none, and one that takes a name from here."""
    found = EntryPoints(EntryPoint(name, value, registry.ENTRY_POINTS) for name, value in OFFERED.items())
    monkeypatch.setattr(registry, "entry_points", lambda *, group: found.select(group=group))


@pytest.mark.usefixtures("offered")
def test_another_package_can_add_a_policy_but_not_replace_one() -> None:
    assert make_policy("others").name == "others"
    assert make_policy("gorgo").name == "gorgo"
    assert policy_names() == [*POLICIES, *sorted(set(OFFERED) - {"gorgo"})]


@pytest.mark.usefixtures("offered")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "broken",
            "builtins:dict of the entry point 'broken' has no name, summary, unit, weight_specs, index",
        ),
        ("without-unit", "has no unit; expected what gorgo.core.policy.interface.Policy has"),
        ("odd-index", "has the index 'bound'; expected one of published, bounded, events, any"),
        ("other-name", "has the name 'others'; expected that of the entry point"),
        (
            "no-module",
            "nowhere.at_all:Others of the entry point 'no-module' cannot be loaded: ModuleNotFoundError",
        ),
        ("no-class", "cannot be loaded: .*Othrs"),
    ],
)
def test_an_entry_point_that_is_no_policy_says_what_it_lacks(name: str, message: str) -> None:
    with pytest.raises(UnknownPolicy, match=message):
        make_policy(name)
