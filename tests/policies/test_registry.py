"""How a policy is registered and offered, and weights that take effect at once."""

from __future__ import annotations

from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import gorgo.policies
from gorgo.core.policy.interface import Candidates, Choice, Policy
from gorgo.core.policy.weights import Weights
from gorgo.errors import ConfigError, UnknownPolicy
from gorgo.policies import registry
from gorgo.policies.baselines import Nearest
from gorgo.policies.gorgo import Gorgo
from gorgo.policies.gorgo_ms import GorgoMs
from gorgo.policies.learned.base import LearnedPolicy
from gorgo.policies.multi_depth import MultiDepth
from gorgo.policies.prefix_cache import PrefixThreshold
from gorgo.policies.published import PrebleE2
from gorgo.policies.registry import POLICIES, make_policy, make_shadow, policy_names
from tests.policies.table import request, table


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


# --- Weights take effect: an instance that has chosen under one set goes by the next one at once.
#
# What an operator or a tuner sets live reaches a policy only as an argument of its next choice, so nothing that it
# keeps between choices may outlive a set of weights.


NOW = 100.0


def rows() -> Candidates:
    """Two replicas that differ in every signal: 20 and 100 ms away, 2 s and 0.5 s of work, 3 and 1 in flight.

    A prefill of the 1,000 tokens takes 1 s where nothing is cached, and 0.4 s on the second one.
    """
    candidates = table(
        2,
        cached=[0, 600],
        rtt_s=[0.020, 0.100],
        in_flight_requests=[3, 1],
        in_flight_tokens=[3000, 500],
        queued_prefill_tokens=[2000, 250],
        running_requests=[3, 1],
        queued_requests=[2, 0],
        used_tokens=[9000, 700],
        kv_capacity_tokens=[10_000, 10_000],
        prefill_token_s=[0.001, 0.001],
        slowdown=[1.0, 1.0],
        drained_at_s=[NOW + 0.010 + 2.0, NOW + 0.050 + 0.5],
        head_due_s=[np.inf, np.inf],
        prefill_share=[0.4, 0.1],
        prefill_share_s=[NOW, NOW],
    )
    candidates.now = NOW
    return candidates


def chosen(policy: Policy, weights: Weights) -> Choice:
    return policy.choose(request(), rows(), weights, np.random.default_rng(0))


def answer(choice: Choice) -> tuple[object, ...]:
    terms = {name: column.tolist() for name, column in choice.terms.items()}
    return choice.row, choice.fallback, choice.predicted_ttft_s, terms


#: Terms of `gorgo-ms` that no weight changes: nothing is shared, and the pools are empty.
ALONE = {"prefill": [1000, 400], "room": [0, 0], "shared": [0, 0]}
#: Those of a learned policy take effect with a model (`learned/test_base.py`), those of `multi-depth` with routes
#: (`test_multi_depth.py`), those of `preble-e2` with earlier requests (`test_published.py`).
WEIGHTED = [
    name
    for name in policy_names()
    if make_policy(name).weight_specs and not isinstance(make_policy(name), LearnedPolicy | MultiDepth | PrebleE2)
]


@pytest.mark.parametrize("name", WEIGHTED)
def test_an_instance_that_has_chosen_goes_by_the_next_weights_as_a_new_one_does(name: str) -> None:
    policy = make_policy(name)
    for spec in policy.weight_specs:
        answers = []
        for value in (spec.low, spec.high, spec.low):
            weights = Weights.of(policy.weight_specs, {spec.name: value})
            answers.append(answer(chosen(policy, weights)))
            assert answers[-1] == answer(chosen(make_policy(name), weights)), f"{spec.name} = {value}"
        assert answers[0] == answers[2] != answers[1], f"{spec.name} changes nothing"


@pytest.mark.parametrize(
    ("policy", "values", "terms"),
    [
        (Gorgo(), {}, {"rtt": [10, 50], "queue": [300, 50], "prefill": [1000, 400]}),
        (Gorgo(), {"w_rtt": 2.0}, {"rtt": [40, 200], "queue": [300, 50], "prefill": [1000, 400]}),
        (Gorgo(), {"w_queue": 0.5}, {"rtt": [10, 50], "queue": [1500, 250], "prefill": [1000, 400]}),
        (
            GorgoMs(),
            {},
            {"rtt": [20, 100], "queue": [2000, 500], "externality": [3 * 175 + 320, 85 + 80], **ALONE},
        ),
        (
            GorgoMs(),
            {"m_rtt": 3.0},
            {"rtt": [60, 300], "queue": [2000, 500], "externality": [3 * 175 + 320, 85 + 80], **ALONE},
        ),
        (
            GorgoMs(),
            {"m_queue": 0.5},
            {"rtt": [20, 100], "queue": [1000, 250], "externality": [3 * 175 + 320, 85 + 80], **ALONE},
        ),
        (
            GorgoMs(),
            {"lambda": 1.0},
            {"rtt": [20, 100], "queue": [2000, 500], "externality": [3 * 1025 + 320, 425 + 80], **ALONE},
        ),
        (
            GorgoMs(),
            {"delta": 0.0},
            {"rtt": [20, 100], "queue": [2000, 500], "externality": [3 * 150 + 320, 60 + 80], **ALONE},
        ),
        (
            GorgoMs(),
            {"eta": 0.0},
            {"rtt": [20, 100], "queue": [2000, 500], "externality": [3 * 175, 85], **ALONE},
        ),
    ],
)
def test_terms_are_what_the_weights_make_of_the_signals(
    policy: Policy, values: dict[str, float], terms: dict[str, Any]
) -> None:
    chosen(policy, Weights.of(policy.weight_specs))
    choice = chosen(policy, Weights.of(policy.weight_specs, values))
    assert {name: column.tolist() for name, column in choice.terms.items()} == {
        name: pytest.approx(column) for name, column in terms.items()
    }


def test_a_threshold_set_live_decides_which_prefix_is_a_match() -> None:
    policy = PrefixThreshold()
    answers = [chosen(policy, Weights.of(policy.weight_specs, {"tau": tau})).fallback for tau in (0.59, 0.6, 0.59)]
    assert answers == [None, "below_threshold", None]
