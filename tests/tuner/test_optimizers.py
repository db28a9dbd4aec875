"""Every optimizer of the registry keeps the contract."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from math import cos, exp, inf, log, nan, pi, sin
from typing import Any

import numpy as np
import pytest

from gorgo.core.policy.weights import WeightSpec
from gorgo.errors import TunerError, WeightsError
from gorgo.policies.registry import make_policy
from tuner.optimizers import registry
from tuner.optimizers.base import Optimizer, generator_of, generator_state
from tuner.optimizers.cma_es import CmaEs
from tuner.optimizers.es import SIGMA0, SIGMA_MAX, OnePlusOneES, ProbingES, PublishedES, ReleasedES
from tuner.optimizers.registry import OPTIMIZERS, RandomSearch, load_optimizer, make_optimizer, optimizer_names
from tuner.space import LogBox, tuned_box

PAPER_BOX = LogBox((WeightSpec("w_rtt", 0.5, 0.05, 2.0, "per ms"), WeightSpec("w_queue", 0.1, 0.05, 0.5, "per token")))
START = {"w_rtt": 0.5, "w_queue": 0.1}

#: Those that other packages offer as well, where they are installed.
every = pytest.mark.parametrize("name", optimizer_names())


def make(name: str, seed: int = 0, budget: int = 50) -> Optimizer:
    return make_optimizer(name, PAPER_BOX, START, np.random.default_rng(seed), budget=budget)


def cost(weights: dict[str, float]) -> float:
    """Lowest at (0.2, 0.3); positive."""
    return 1 + log(weights["w_rtt"] / 0.2) ** 2 + log(weights["w_queue"] / 0.3) ** 2


def steps(optimizer: Optimizer, count: int) -> list[dict[str, float]]:
    asked = []
    for _ in range(count):
        asked.append(optimizer.ask())
        optimizer.tell(asked[-1], cost(asked[-1]))
    return asked


@every
def test_proposals_stay_in_the_box(name: str) -> None:
    for weights in steps(make(name), 50):
        assert 0.05 <= weights["w_rtt"] <= 2.0
        assert 0.05 <= weights["w_queue"] <= 0.5


@every
def test_same_seed_gives_the_same_proposals_and_another_seed_others(name: str) -> None:
    assert steps(make(name, 1), 20) == steps(make(name, 1), 20)
    assert (steps(make(name, 1), 20) == steps(make(name, 2), 20)) == (name == "fixed")


@every
def test_numpy_s_global_generator_is_left_alone(name: str) -> None:
    np.random.seed(7)
    before = np.random.get_state()[1].copy()  # type: ignore[index]
    steps(make(name), 20)
    assert (np.random.get_state()[1] == before).all()  # type: ignore[index]


@every
def test_asking_twice_gives_the_same_proposal(name: str) -> None:
    optimizer = make(name)
    assert optimizer.ask() == optimizer.ask()


@every
@pytest.mark.parametrize("asked", [False, True], ids=["between generations", "with a proposal out"])
def test_a_restarted_process_goes_on_with_the_same_proposals_after_any_step(name: str, asked: bool) -> None:
    kept = make(name, 3)
    for _ in range(25):
        if asked:
            kept.ask()
        loaded = load_optimizer(PAPER_BOX, json.loads(json.dumps(kept.state())))
        assert loaded.state() == kept.state()
        assert (loaded.sigma, loaded.incumbent, loaded.stop()) == (kept.sigma, kept.incumbent, kept.stop())
        assert steps(loaded, 8) == steps(load_optimizer(PAPER_BOX, kept.state()), 8)
        loaded = load_optimizer(PAPER_BOX, json.loads(json.dumps(kept.state())))
        assert loaded.ask() == kept.ask()
        kept.tell(kept.ask(), cost(kept.ask()))


@every
def test_options_come_back_with_the_state(name: str) -> None:
    steps_of_es = {"sigma0": 0.3, "sigma_min": 0.1, "damping": 3.0, "patience": 4}
    options = {"es": steps_of_es, "es-probes": steps_of_es, "es-published": steps_of_es, "cma": {"population": 4}}
    kept = make_optimizer(name, PAPER_BOX, START, np.random.default_rng(0), budget=9)
    if name in options:
        kept = OPTIMIZERS[name](PAPER_BOX, START, np.random.default_rng(0), budget=9, **options[name])  # type: ignore[arg-type]
    loaded = load_optimizer(PAPER_BOX, kept.state())
    assert loaded.state() == kept.state()
    assert steps(loaded, 9) == steps(kept, 9)
    assert loaded.stop() == kept.stop()


@every
def test_what_is_no_cost_is_refused_and_changes_nothing(name: str) -> None:
    optimizer = make(name)
    weights, before = optimizer.ask(), optimizer.state()
    for value in (nan, inf, -inf, None, "1"):
        with pytest.raises(TunerError, match="expected a finite number"):
            optimizer.tell(weights, value)  # type: ignore[arg-type]
        with pytest.raises(TunerError, match="expected a finite number"):
            optimizer.tell_incumbent(value)  # type: ignore[arg-type]
        assert optimizer.state() == before


@every
def test_weights_that_were_not_asked_are_refused(name: str) -> None:
    optimizer = make(name)
    with pytest.raises(TunerError, match="expected what was asked"):
        optimizer.tell(START, 1.0)
    optimizer.ask()
    with pytest.raises(TunerError, match="expected what was asked"):
        optimizer.tell({"w_rtt": 1.999, "w_queue": 0.06}, 1.0)


@every
def test_it_stops_when_its_budget_is_spent(name: str) -> None:
    optimizer = make(name, budget=5)
    steps(optimizer, 4)
    assert optimizer.stop() is None
    steps(optimizer, 1)
    assert optimizer.stop() == "budget of 5 evaluations is spent"


@every
def test_a_verdict_stands_over_the_comparison_of_two_numbers(name: str) -> None:
    optimizer = make(name)
    optimizer.tell_incumbent(10.0)
    weights = optimizer.ask()
    optimizer.tell(weights, 1.0, accepted=False)
    assert optimizer.incumbent == pytest.approx(START)
    weights = optimizer.ask()
    optimizer.tell(weights, 99.0, accepted=True)
    assert optimizer.incumbent == pytest.approx(weights)


@every
def test_an_incumbent_measured_again_loses_its_lucky_window(name: str) -> None:
    optimizer = make(name)
    optimizer.tell_incumbent(1.0)
    optimizer.tell_incumbent(10.0)
    weights = optimizer.ask()
    optimizer.tell(weights, 5.0)
    assert optimizer.incumbent == pytest.approx(weights)


@every
def test_it_begins_again_from_other_weights(name: str) -> None:
    optimizer = make(name)
    steps(optimizer, 9)
    optimizer.ask()
    optimizer.recentre({"w_rtt": 1.0, "w_queue": 0.4})
    assert optimizer.incumbent == pytest.approx({"w_rtt": 1.0, "w_queue": 0.4})
    assert steps(load_optimizer(PAPER_BOX, optimizer.state()), 9) == steps(optimizer, 9)


@every
def test_a_start_outside_the_box_is_refused(name: str) -> None:
    with pytest.raises(WeightsError, match="w_queue"):
        make_optimizer(name, PAPER_BOX, {"w_queue": 0.9}, np.random.default_rng(0))


@every
def test_a_budget_of_nothing_is_refused(name: str) -> None:
    with pytest.raises(TunerError, match="budget is 0"):
        make(name, budget=0)


@every
def test_damaged_state_is_refused_with_the_optimizer_s_name(name: str) -> None:
    state = make(name).state()
    for key in ("parent", "rng"):
        with pytest.raises(TunerError, match=f"optimizer '{name}' is damaged"):
            load_optimizer(PAPER_BOX, {**state, key: None})
    with pytest.raises(TunerError, match=rf"saved optimizer '{name}'\.told is None; expected a whole number from 0"):
        load_optimizer(PAPER_BOX, {**state, "told": None})
    del state["budget"]
    with pytest.raises(TunerError, match=f"saved optimizer '{name}' has no 'budget'"):
        load_optimizer(PAPER_BOX, state)


@every
@pytest.mark.parametrize("value", ["much", -1, 10**400, 1e308, float("inf"), float("nan"), True, None, [], {}])
def test_an_edited_number_of_a_state_is_refused_or_leaves_an_optimizer_that_ends(name: str, value: object) -> None:
    state = make(name).state()
    for key, was in state.items():
        if key == "optimizer" or isinstance(was, dict):
            continue
        try:
            loaded = load_optimizer(PAPER_BOX, {**state, key: value})
        except TunerError:
            continue
        weights = loaded.ask()
        assert all(spec.low <= weights[spec.name] <= spec.high for spec in PAPER_BOX.specs), key
        loaded.tell(weights, 1.0)
        loaded.stop()


@every
def test_state_over_other_weights_is_refused(name: str) -> None:
    other = LogBox((WeightSpec("m_rtt", 1.0, 0.25, 4.0, "factor"),))
    with pytest.raises(TunerError, match=r"expected .* over \['m_rtt'\]"):
        load_optimizer(other, make(name).state())


@every
def test_one_weight_is_enough(name: str) -> None:
    box = LogBox((WeightSpec("tau", 0.5, 0.05, 0.95, "share"),))
    optimizer = make_optimizer(name, box, {}, np.random.default_rng(0))
    for _ in range(12):
        weights = optimizer.ask()
        optimizer.tell(weights, weights["tau"])
    assert optimizer.incumbent["tau"] <= 0.5


def test_unknown_name_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(
        TunerError, match="expected one of es, es-probes, es-published, es-released, cma, random, fixed"
    ):
        make_optimizer("adam", PAPER_BOX, START, np.random.default_rng(0))


def test_fixed_never_moves() -> None:
    assert steps(make("fixed"), 20) == [pytest.approx(START)] * 20


def test_generator_comes_back_in_mid_stream() -> None:
    rng = np.random.default_rng(5)
    rng.integers(0, 9, 3, dtype=np.uint32)  # leaves half a word behind
    again = generator_of(json.loads(json.dumps(generator_state(rng))))
    assert again.integers(0, 9, 9, dtype=np.uint32).tolist() == rng.integers(0, 9, 9, dtype=np.uint32).tolist()


def test_another_kind_of_generator_is_refused() -> None:
    with pytest.raises(TunerError, match="MT19937"):
        generator_state(np.random.Generator(np.random.MT19937(0)))


@every
@pytest.mark.parametrize(("value", "better"), [(4.999, True), (5.0, False), (5.001, False)])
def test_only_a_lower_cost_is_better(name: str, value: float, better: bool) -> None:
    optimizer = make(name)
    optimizer.tell_incumbent(5.0)
    weights = optimizer.ask()
    optimizer.tell(weights, value)
    assert optimizer.incumbent == pytest.approx(weights if better else START)


@every
def test_the_first_cost_after_it_began_again_is_the_incumbent_s(name: str) -> None:
    optimizer = make(name)
    optimizer.tell(optimizer.ask(), 1.0, accepted=True)
    optimizer.recentre(START)
    weights = optimizer.ask()
    optimizer.tell(weights, 99.0)
    assert optimizer.incumbent == pytest.approx(weights)


@every
def test_weights_are_the_asked_ones_up_to_rounding_and_all_of_them(name: str) -> None:
    optimizer = make(name)
    weights = optimizer.ask()
    for wrong in ({}, {"w_rtt": weights["w_rtt"]}, weights | {"w_queue": weights["w_queue"] + 1e-6}):
        with pytest.raises(TunerError, match="expected what was asked"):
            optimizer.tell(wrong, 1.0)
    optimizer.tell(weights | {"w_queue": weights["w_queue"] + 1e-12}, 1.0)


@every
def test_a_whole_number_is_a_cost(name: str) -> None:
    optimizer = make(name)
    optimizer.tell(optimizer.ask(), 3)
    assert optimizer.state()["incumbent_value"] == 3
    optimizer.tell_incumbent(4)
    assert json.dumps(optimizer.state()["incumbent_value"]) == "4.0"


@every
def test_it_may_evaluate_two_hundred_times_unless_said_and_once_is_enough(name: str) -> None:
    assert make_optimizer(name, PAPER_BOX, START, np.random.default_rng(0)).state()["budget"] == 200
    optimizer = make(name, budget=1)
    assert optimizer.stop() is None
    steps(optimizer, 1)
    assert optimizer.stop() == "budget of 1 evaluations is spent"


class Offered(RandomSearch):
    """An optimizer of another package."""


def test_other_packages_offer_optimizers_by_entry_points_that_replace_none_of_ours(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    places = [EntryPoint(name, f"{__name__}:Offered", "gorgo.optimizers") for name in ("zebra", "ant", "es")]

    def offered(*, group: str, name: str | None = None) -> Iterator[EntryPoint]:
        return (one for one in places if one.group == group and name in (None, one.name))

    monkeypatch.setattr(registry, "entry_points", offered)
    assert optimizer_names() == [
        "es",
        "es-probes",
        "es-published",
        "es-released",
        "cma",
        "random",
        "fixed",
        "ant",
        "zebra",
    ]
    rng = np.random.default_rng(0)
    assert {name: type(make_optimizer(name, PAPER_BOX, START, rng)) for name in ("ant", "zebra", "es")} == {
        "ant": Offered,
        "zebra": Offered,
        "es": OPTIMIZERS["es"],
    }
    assert make_optimizer("ant", PAPER_BOX, START, rng, budget=7).state()["budget"] == 7
    with pytest.raises(
        TunerError, match="expected one of es, es-probes, es-published, es-released, cma, random, fixed, ant, zebra"
    ):
        make_optimizer("adam", PAPER_BOX, START, rng)


# --- ES and CMA-ES: steps, rules, what the `cma` package gets and gives, and how soon each finds the bottom of a bowl.


# --- The (1+1)-ES: its steps, its rule, where it stops, and how it begins again.


WIDE = LogBox(tuple(WeightSpec(name, 1.0, 1e-9, 1e9, "any") for name in ("a", "b")))
NARROW = LogBox((WeightSpec("a", 1.0, 0.9, 1.1, "any"), WeightSpec("b", 1.0, 0.5, 2.0, "any")))


def es(box: LogBox = WIDE, *, seed: int = 0, **options: float) -> OnePlusOneES:
    return OnePlusOneES(box, {}, np.random.default_rng(seed), **{"sigma0": SIGMA0, **options})  # type: ignore[arg-type]


def fail(optimizer: OnePlusOneES, times: int = 1) -> OnePlusOneES:
    for _ in range(times):
        optimizer.tell(optimizer.ask(), 1.0, accepted=False)
    return optimizer


def succeed(optimizer: OnePlusOneES, times: int = 1) -> OnePlusOneES:
    for _ in range(times):
        optimizer.tell(optimizer.ask(), 1.0, accepted=True)
    return optimizer


def test_a_step_is_a_normal_one_of_size_sigma_in_log_space() -> None:
    draws = np.random.default_rng(3).standard_normal((2, 2))
    optimizer = es(seed=3, sigma0=0.3)
    asked = optimizer.ask()
    assert [log(value) for value in asked.values()] == pytest.approx((0.3 * draws[0]).tolist())
    optimizer.tell(asked, 1.0, accepted=True)
    at = 0.3 * draws[0] + 0.3 * exp(1 / 2) * draws[1]
    assert [log(value) for value in optimizer.ask().values()] == pytest.approx(at.tolist())


def test_a_step_out_of_the_box_ends_on_its_edge() -> None:
    optimizer = es(NARROW, sigma0=2.0, patience=1000)
    asked = [fail(optimizer).ask() for _ in range(12)]
    assert {0.9, 1.1} < {one["a"] for one in asked}
    assert all(0.9 <= one["a"] <= 1.1 and 0.5 <= one["b"] <= 2.0 for one in asked)


@pytest.mark.parametrize(
    ("sigma0", "sigma_min"), [(0.0, 0.0), (0.5, 0.0), (0.5, 0.5), (0.5, 0.6), (2.01, 0.1), (0.5, -0.1)]
)
def test_step_sizes_that_cannot_be_are_refused(sigma0: float, sigma_min: float) -> None:
    with pytest.raises(TunerError, match="expected 0 < sigma_min < sigma0 <= 2"):
        es(sigma0=sigma0, sigma_min=sigma_min)
    assert es(sigma0=2.0).sigma == 2.0


def test_damping_grows_with_the_number_of_weights_unless_given() -> None:
    assert es().damping == 2.0
    assert es(LogBox(WIDE.specs[:1])).damping == 1.5
    assert succeed(es(damping=4.0)).sigma == pytest.approx(0.5 * exp(1 / 4))
    assert fail(es(damping=4.0)).sigma == pytest.approx(0.5 * exp(-1 / 16))


def test_failures_in_a_row_end_the_search_and_a_success_forgives_them() -> None:
    optimizer = fail(es(sigma_min=1e-9, patience=3), 2)
    assert optimizer.stop() is None
    assert fail(optimizer).stop() == "converged: no success in 3 proposals"
    assert succeed(optimizer).stop() is None
    assert fail(optimizer, 2).stop() is None


def test_steps_below_the_smallest_end_the_search() -> None:
    # Each failure takes sigma by exp(-1/8): four of them from 0.5 to 0.303, five to 0.268.
    optimizer = fail(es(sigma_min=0.3), 4)
    assert optimizer.stop() is None
    assert fail(optimizer).stop() == "converged: steps of 26.8% are below 30.0%"
    assert fail(es(sigma_min=0.5 * exp(-1 / 8))).stop() is None, "the smallest is not below itself"


def test_it_begins_again_with_its_first_step_and_all_its_patience() -> None:
    optimizer = fail(es(sigma0=0.4, sigma_min=0.3, patience=5), 5)
    assert optimizer.stop() is not None
    optimizer.recentre({"a": 3.0, "b": 0.25})
    assert (optimizer.sigma, optimizer.failures, optimizer.stop()) == (0.4, 0, None)
    assert optimizer.observed == 5, "the budget goes on"
    assert optimizer.incumbent == pytest.approx({"a": 3.0, "b": 0.25})
    assert optimizer.incumbent_value is None, "nothing is known of what it costs there"


def test_what_was_asked_before_is_forgotten_when_it_begins_again() -> None:
    optimizer = es()
    asked = optimizer.ask()
    optimizer.recentre({"a": 100.0, "b": 100.0})
    with pytest.raises(TunerError, match="expected what was asked"):
        optimizer.tell(asked, 1.0)
    steps = [log(value / 100.0) for value in optimizer.ask().values()]
    assert max(map(abs, steps)) < 4 * optimizer.sigma, "around the new centre"


def test_a_proposal_that_would_be_its_parent_is_drawn_again() -> None:
    corner = LogBox((WeightSpec("a", 2.0, 1.0, 2.0, "any"), WeightSpec("b", 2.0, 1.0, 2.0, "any")))
    for seed in range(30):  # three of four draws are clipped onto the corner
        assert es(corner, seed=seed).ask() != {"a": 2.0, "b": 2.0}


def test_the_first_step_is_a_quarter_of_the_box_in_log_space_and_two_at_most() -> None:
    # Factors of 10^4 and 16 from one side to the other, so a mean of 10^2 * 4; a quarter of its logarithm.
    assert OnePlusOneES(BOX, {}, np.random.default_rng(0)).sigma == pytest.approx(log(400.0) / 4)
    assert CmaEs(BOX, {}, np.random.default_rng(0)).sigma == pytest.approx(log(400.0) / 4)
    assert OnePlusOneES(WIDE, {}, np.random.default_rng(0)).sigma == SIGMA_MAX
    for kind in (PublishedES, ProbingES, ReleasedES):
        assert kind(BOX, {}, np.random.default_rng(0)).sigma == SIGMA0


def far_from_the_default(weights: dict[str, float]) -> float:
    """Return a cost with a plateau: only three times the default ratio of the two weights helps, and no less shows."""
    return 0.2 if weights["w_rtt"] / weights["w_queue"] > 15 else 1.0


@pytest.mark.parametrize(
    ("kind", "found"), [(OnePlusOneES, range(15, 21)), (CmaEs, range(15, 21)), (PublishedES, range(4))]
)
def test_a_day_of_twenty_comparisons_passes_a_plateau_by_steps_of_the_box_alone(
    kind: type[OnePlusOneES | CmaEs], found: range
) -> None:
    box = tuned_box(make_policy("gorgo").weight_specs)
    successes = 0
    for seed in range(20):
        optimizer = kind(box, {}, np.random.default_rng(seed))
        for _ in range(20):
            weights = optimizer.ask()
            value = far_from_the_default(weights)
            optimizer.tell(weights, value, accepted=value < far_from_the_default(optimizer.incumbent))
        successes += far_from_the_default(optimizer.incumbent) < 1.0
    assert successes in found


def test_it_starts_with_half_and_ends_at_a_twentieth_or_after_25_failures_unless_said() -> None:
    state = es().state()
    assert {name: state[name] for name in ("sigma", "sigma0", "sigma_min", "patience", "failures")} == {
        "sigma": 0.5,
        "sigma0": 0.5,
        "sigma_min": 0.05,
        "patience": 25,
        "failures": 0,
    }


def test_a_step_grows_by_successes_to_two_and_no_further() -> None:
    # Each success takes sigma by exp(1/2): 1.5 to 2.47.
    optimizer = succeed(es(sigma0=1.5))
    assert optimizer.sigma == 2.0
    assert fail(optimizer).sigma == pytest.approx(2.0 * exp(-1 / 8))


class Upwards:
    """In the place of a generator: every draw is a step up."""

    def __init__(self) -> None:
        self.draws = 0

    def standard_normal(self, size: int) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        self.draws += 1
        return np.ones(size)


def test_a_proposal_that_stays_its_parent_is_given_after_twenty_draws() -> None:
    corner, rng = LogBox((WeightSpec("a", 2.0, 1.0, 2.0, "any"),)), Upwards()
    assert OnePlusOneES(corner, {}, rng).ask() == pytest.approx({"a": 2.0})  # type: ignore[arg-type]
    assert rng.draws == 20


#: A quarter of the box is a factor of 10 of a, and of 2 of b; an eighth is that of their roots.
BOX = LogBox((WeightSpec("a", 1.0, 1e-2, 1e2, "any"), WeightSpec("b", 1.0, 0.25, 4.0, "any")))


def probing(box: LogBox = BOX, start: dict[str, float] | None = None) -> ProbingES:
    return ProbingES(box, start or {}, np.random.default_rng(0))


def tell(optimizer: ProbingES, *accepted: bool) -> list[tuple[float, ...]]:
    found = []
    for verdict in accepted:
        weights = optimizer.ask()
        found.append(tuple(round(value, 9) for value in weights.values()))
        optimizer.tell(weights, 1.0, accepted=verdict)
    return found


def test_each_weight_moves_alone_by_a_quarter_of_its_box_up_and_then_down_and_then_by_an_eighth() -> None:
    a, b = round(10**0.5, 9), round(2**0.5, 9)
    assert tell(probing(), *[False] * 8) == [
        *((10.0, 1.0), (1.0, 2.0), (0.1, 1.0), (1.0, 0.5)),
        *((a, 1.0), (1.0, b), (round(1 / a, 9), 1.0), (1.0, round(1 / b, 9))),
    ]


def test_a_direction_is_repeated_while_it_succeeds_and_its_way_back_is_left_out() -> None:
    found = tell(probing(), True, True, False, True, False)
    # At the upper corner of a no room is left; down from there is where it came from.
    assert found[:3] == [(10.0, 1.0), (100.0, 1.0), (100.0, 2.0)]
    assert found[3] == (100.0, 0.5)
    assert found[4] == (100.0, 0.25)


def test_after_the_probes_the_es_takes_its_first_steps_from_the_best() -> None:
    optimizer = probing()
    tell(optimizer, False, True, *[False] * 6)
    assert (optimizer.sigma, optimizer.failures) == (SIGMA0, 0)
    assert optimizer.incumbent == {"a": 1.0, "b": 2.0}
    assert tell(optimizer, False) != tell(optimizer, False)
    assert optimizer.sigma < SIGMA0


def test_a_probe_that_the_box_cuts_to_less_than_a_tenth_is_left_out() -> None:
    near, far = {"a": 90.0, "b": 1.0}, {"a": 30.0, "b": 1.0}
    assert tell(probing(start=near), False)[0] == (90.0, 2.0)
    assert tell(probing(start=far), False)[0] == (100.0, 1.0)


def test_other_start_weights_are_probed_anew() -> None:
    optimizer = probing()
    tell(optimizer, *[False] * 9)
    optimizer.recentre({"a": 1.0, "b": 2.0})
    assert tell(optimizer, False) == [(10.0, 2.0)]


def test_it_finds_weights_that_are_wrong_by_a_factor_of_thirty_in_fewer_candidates_than_the_es() -> None:
    box = LogBox((WeightSpec("a", 0.5, 0.05, 200.0, "any"), WeightSpec("b", 0.1, 0.02, 5.0, "any")))

    def needed(kind: type[OnePlusOneES], seed: int) -> int:
        optimizer, best = kind(box, {}, np.random.default_rng(seed)), 1.0
        while best > 0.75:
            weights = optimizer.ask()
            value = 1 - 0.4 / (1 + log(weights["a"] / 15) ** 2)
            accepted = value < 0.95 * best  # a smaller gain is not shown
            optimizer.tell(weights, value, accepted=accepted)
            best = value if accepted else best
            if optimizer.stop():
                return 100
        return optimizer.observed

    assert max(needed(ProbingES, seed) for seed in range(10)) == 2
    assert np.median([needed(OnePlusOneES, seed) for seed in range(10)]) > 3


@pytest.mark.parametrize("directions", [None, [[0, 2, 4]], [[2, 1, 4]], [0], [[0, 1, 4]] * 9, [[0, 1, 3]], [[0, 1]]])
def test_an_edited_list_of_directions_is_refused(directions: Any) -> None:
    state = probing().state()
    with pytest.raises(TunerError, match=r"directions is .*; expected"):
        load_optimizer(BOX, state | {"directions": directions})


LOG_BOX = LogBox((WeightSpec("w_rtt", 0.5, 0.05, 2.0, "per ms"), WeightSpec("w_queue", 0.1, 0.05, 0.5, "per token")))


def judged(*accepted: bool) -> ReleasedES:
    optimizer = ReleasedES(LOG_BOX, {}, np.random.default_rng(0))
    for one in accepted:
        optimizer.tell(optimizer.ask(), 1.0, accepted=one)
    return optimizer


@pytest.mark.parametrize(
    ("accepted", "sigma"),
    [
        ([True] * 7, 0.5),
        ([True] * 2 + [False] * 6, 0.5 / 0.817),
        ([True] + [False] * 7, 0.5 * 0.817),
        ([True] * 2 + [False] * 7, 0.5 / 0.817 * 0.817),
        ([True] * 2 + [False] * 8, 0.5 / 0.817 * 0.817 * 0.817),
    ],
)
def test_sigma_goes_by_the_success_rate_of_the_last_eight(accepted: list[bool], sigma: float) -> None:
    assert judged(*accepted).sigma == sigma


def test_ends_after_16_candidates_and_begins_again_from_other_weights() -> None:
    optimizer = judged(*[False] * 15)
    assert optimizer.stop() is None
    optimizer = judged(*[False] * 16)
    assert optimizer.stop() == "16 candidates, as released"
    optimizer.recentre({"w_rtt": 1.0, "w_queue": 0.2})
    assert (optimizer.stop(), optimizer.sigma) == (None, 0.5)


# --- What is handed to the `cma` package and taken from it: box, start, population, values.


WIDE_CMA_ES = LogBox(tuple(WeightSpec(name, 1.0, 1e-6, 1e6, "any") for name in ("a", "b")))
FAR = {"a": 1000.0, "b": 0.001}


def cma(box: LogBox = WIDE_CMA_ES, *, seed: int = 0, **options: float) -> CmaEs:
    return CmaEs(box, {}, np.random.default_rng(seed), **{"sigma0": SIGMA0, **options})  # type: ignore[arg-type]


def generation(optimizer: CmaEs, centre: dict[str, float], *, size: int = 6) -> list[dict[str, float]]:
    """A population's proposals, told so that the search is drawn to `centre`."""
    asked = []
    for _ in range(size):
        weights = optimizer.ask()
        asked.append(weights)
        optimizer.tell(weights, sum(log(weights[name] / centre[name]) ** 2 for name in centre), accepted=False)
    return asked


def away(asked: list[dict[str, float]], centre: dict[str, float]) -> float:
    """Mean distance of the proposals from a point, in steps of one e-fold."""
    return float(np.mean([sum(log(one[name] / centre[name]) ** 2 for name in centre) ** 0.5 for one in asked]))


def test_proposals_lie_around_the_start() -> None:
    assert away(generation(cma(), {"a": 1.0, "b": 1.0}), {"a": 1.0, "b": 1.0}) < 3 * 0.5


def test_it_begins_again_around_the_new_centre_with_its_first_step() -> None:
    optimizer = cma(sigma0=0.4)
    for _ in range(4):
        generation(optimizer, {"a": 1.0, "b": 1.0})
    assert optimizer.sigma != 0.4
    optimizer.ask()
    optimizer.recentre(FAR)
    assert optimizer.sigma == pytest.approx(0.4)
    assert away(generation(optimizer, FAR), FAR) < 3 * 0.4
    assert optimizer.observed == 4 * 6 + 6, "the budget goes on"


def test_values_of_a_population_that_was_left_half_way_are_not_told_to_the_next() -> None:
    optimizer = cma()
    weights = optimizer.ask()
    optimizer.tell(weights, 1.0)
    optimizer.recentre(FAR)
    generation(optimizer, FAR)
    assert len(optimizer.state()["values"]) == 6
    assert optimizer.state()["origin"] == pytest.approx([log(1000.0), log(0.001)])


def test_no_raw_proposal_leaves_the_box() -> None:
    # The box clips what comes out, so the search would learn from points that it has not tried.
    low, high = np.array(NARROW.low), np.array(NARROW.high)
    optimizer = cma(NARROW, sigma0=2.0)
    for _ in range(30):
        weights = optimizer.ask()
        raw = np.array(optimizer.state()["asked"])
        assert ((low - 1e-12 <= raw) & (raw <= high + 1e-12)).all(), raw
        optimizer.tell(weights, 1.0 + weights["a"])


def test_proposals_that_lie_outside_a_box_are_no_sixfold_edge() -> None:
    asked = [one["a"] for one in generation(cma(NARROW, sigma0=2.0), {"a": 1.0, "b": 1.0})]
    assert len(set(asked)) == 6, "mirrored into the box, not put on its edge"


def test_the_search_goes_where_values_are_low() -> None:
    optimizer, bottom = cma(), {"a": 20.0, "b": 0.05}
    first = away(generation(optimizer, bottom), bottom)
    for _ in range(15):
        last = generation(optimizer, bottom)
    assert away(last, bottom) < first / 4


@pytest.mark.parametrize("population", [4, 9])
def test_a_population_is_as_large_as_it_is_asked_to_be(population: int) -> None:
    optimizer = cma(population=population)
    before = optimizer.sigma
    for told in range(1, population + 1):
        optimizer.tell(optimizer.ask(), float(told))
        assert (optimizer.sigma != before) == (told == population)
    assert optimizer.state()["population"] == population


def test_steps_below_the_smallest_end_a_search_by_cma_es() -> None:
    optimizer = cma(sigma_min=0.499)
    assert optimizer.stop() is None
    for _ in range(20):
        generation(optimizer, {"a": 1.0, "b": 1.0})
        if reason := optimizer.stop():
            break
    assert reason == f"converged: steps of {optimizer.sigma:.1%} are below 49.9%"


def test_what_cma_itself_says_ends_the_search() -> None:
    optimizer = cma(sigma_min=1e-300, budget=2000)
    while (reason := optimizer.stop()) is None:
        generation(optimizer, {"a": 1.0, "b": 1.0})
    assert reason.startswith("cma: tol")


def test_a_budget_ends_the_search_in_the_midst_of_a_population() -> None:
    optimizer = cma(budget=4)
    generation(optimizer, {"a": 1.0, "b": 1.0}, size=4)
    assert optimizer.stop() == "budget of 4 evaluations is spent"


def test_it_starts_with_half_and_ends_below_a_twentieth_unless_said() -> None:
    state = cma().state()
    assert (state["sigma0"], state["sigma_min"], state["population"]) == (0.5, 0.05, None)
    assert cma(sigma0=0.3, sigma_min=0.3).stop() is None, "the smallest is not below itself"


# --- ES and CMA-ES find the bottom of a bowl in log space within a stated budget, with and without noise.


WIDE_CONVERGENCE = LogBox(tuple(WeightSpec(name, 1.0, 1e-3, 1e3, "any") for name in ("a", "b")))
BEST = {"a": 0.2, "b": 4.0}


def sphere(weights: dict[str, float]) -> float:
    return sum(log(weights[name] / BEST[name]) ** 2 for name in BEST)


def noisy(weights: dict[str, float], rng: np.random.Generator) -> float:
    """A p95 that is 5 % lower at the bottom than a factor of e away, and varies by 1 % from window to window."""
    return (1 + 0.05 * sphere(weights)) * exp(0.01 * rng.standard_normal())


def distance(weights: dict[str, float]) -> float:
    return float(sphere(weights) ** 0.5)


@pytest.mark.parametrize(("kind", "evaluations"), [(OnePlusOneES, 150), (CmaEs, 240)])
def test_the_sphere_s_bottom_is_found_to_a_percent(kind: type[OnePlusOneES] | type[CmaEs], evaluations: int) -> None:
    for seed in range(20):
        optimizer = kind(WIDE_CONVERGENCE, {}, np.random.default_rng(seed), budget=evaluations, sigma_min=1e-6)
        while optimizer.observed < evaluations:
            weights = optimizer.ask()
            optimizer.tell(weights, sphere(weights))
        assert distance(optimizer.incumbent) < 0.01, seed


@pytest.mark.parametrize("kind", [OnePlusOneES, CmaEs])
def test_a_noisy_bowl_s_bottom_is_found_to_a_factor_in_120_evaluations(
    kind: type[OnePlusOneES] | type[CmaEs],
) -> None:
    far = [distance(_down_the_noisy_bowl(kind, seed)) for seed in range(20)]
    assert np.median(far) < 0.4
    assert max(far) < 1.2  # from 2.1


def _down_the_noisy_bowl(kind: type[OnePlusOneES] | type[CmaEs], seed: int) -> dict[str, float]:
    noise = np.random.default_rng(1000 + seed)
    optimizer = kind(WIDE_CONVERGENCE, {}, np.random.default_rng(seed), sigma_min=1e-6)
    while optimizer.observed < 120:
        optimizer.tell_incumbent(noisy(optimizer.incumbent, noise))  # a lucky window does not reign
        weights = optimizer.ask()
        optimizer.tell(weights, noisy(weights, noise))
    return optimizer.incumbent


def test_one_proposal_in_five_succeeds_where_the_bottom_stays_as_far_away() -> None:
    for seed in range(20):
        assert _share_of_successes(seed) == pytest.approx(0.2, abs=0.01), seed


def _share_of_successes(seed: int) -> float:
    # Nothing but the rule sets the step here: each time the bottom lies at the same distance, wherever it is.
    optimizer = OnePlusOneES(
        WIDE_CONVERGENCE, {}, np.random.default_rng(seed), sigma0=0.01, sigma_min=1e-6, patience=1000
    )
    compass, far = np.random.default_rng(1000 + seed), 0.01
    successes = 0
    for _ in range(500):
        angle = compass.uniform(0, 2 * pi)
        bottom = _log(optimizer.incumbent) + far * np.array([cos(angle), sin(angle)])
        weights = optimizer.ask()
        better = bool(np.linalg.norm(_log(weights) - bottom) < far)
        optimizer.tell(weights, 1.0, accepted=better)
        successes += better
    return successes / 500


def test_fewer_succeed_on_the_way_down_by_what_sigma_has_to_shrink() -> None:
    # Sigma stays in proportion to the distance, so ln sigma falls as fast as ln distance, phi per proposal. By the
    # rule it changes by (5 p - 1) / (4 d): p = 1/5 - 4/5 d phi. With two weights (d = 2) that is about 0.1.
    rates, expected = [], []
    for seed in range(20):
        optimizer = OnePlusOneES(WIDE_CONVERGENCE, {}, np.random.default_rng(seed), sigma_min=1e-12, patience=1000)
        for _ in range(20):  # from the first step's size to the right one
            _one_step(optimizer)
        before = distance(optimizer.incumbent)
        taken = [_one_step(optimizer) for _ in range(80)]
        phi = log(before / distance(optimizer.incumbent)) / len(taken)
        rates.append(np.mean(taken))
        expected.append(1 / 5 - 4 / 5 * optimizer.damping * phi)
    assert np.mean(rates) == pytest.approx(np.mean(expected), abs=0.01)
    assert 0.08 < np.mean(rates) < 0.14


def _one_step(optimizer: OnePlusOneES) -> bool:
    before = optimizer.incumbent
    weights = optimizer.ask()
    optimizer.tell(weights, sphere(weights))
    return optimizer.incumbent != before


def _log(weights: dict[str, float]) -> np.ndarray[Any, np.dtype[np.float64]]:
    return np.log(list(weights.values()))


def test_sigma_follows_the_rule_and_stands_still_at_one_success_in_five() -> None:
    optimizer = es(WIDE_CONVERGENCE)
    optimizer.tell(optimizer.ask(), 1.0, accepted=True)
    assert optimizer.sigma == pytest.approx(0.5 * exp(1 / 2))  # d = 1 + 2/2
    optimizer.tell(optimizer.ask(), 1.0, accepted=False)
    assert optimizer.sigma == pytest.approx(0.5 * exp(1 / 2 - 1 / 8))
    for _ in range(3):
        optimizer.tell(optimizer.ask(), 1.0, accepted=False)
    assert optimizer.sigma == pytest.approx(0.5)


def test_sigma_has_a_ceiling_and_a_floor_at_which_the_search_has_converged() -> None:
    optimizer = es(WIDE_CONVERGENCE)
    for _ in range(9):
        optimizer.tell(optimizer.ask(), 1.0, accepted=True)
    assert optimizer.sigma == SIGMA_MAX
    while not (reason := optimizer.stop()):
        optimizer.tell(optimizer.ask(), 1.0, accepted=False)
    assert reason == "converged: no success in 25 proposals"
    optimizer = es(WIDE_CONVERGENCE)
    while not (reason := optimizer.stop()):
        optimizer.tell(optimizer.ask(), 1.0, accepted=False)
    assert optimizer.observed == 19
    assert reason == "converged: steps of 4.7% are below 5.0%"


def test_a_parent_in_the_corner_is_not_proposed_to_itself() -> None:
    box = LogBox((WeightSpec("w_rtt", 2.0, 0.05, 2.0, "per ms"), WeightSpec("w_queue", 0.5, 0.05, 0.5, "per token")))
    optimizer = OnePlusOneES(box, {}, np.random.default_rng(0))
    for _ in range(20):
        weights = optimizer.ask()
        assert weights != {"w_rtt": 2.0, "w_queue": 0.5}
        optimizer.tell(weights, 1.0, accepted=False)


def test_cma_stops_where_steps_are_small() -> None:
    optimizer = CmaEs(WIDE_CONVERGENCE, {}, np.random.default_rng(0))
    while not (reason := optimizer.stop()):
        weights = optimizer.ask()
        optimizer.tell(weights, sphere(weights))
    assert reason.startswith("converged: steps of")
    assert distance(optimizer.incumbent) < 0.2
