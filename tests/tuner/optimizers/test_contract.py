"""Every optimizer of the registry keeps the contract."""

from __future__ import annotations

import json
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from math import inf, log, nan

import numpy as np
import pytest

from gorgo.core.policy.weights import WeightSpec
from gorgo.errors import TunerError, WeightsError
from tuner.optimizers import registry
from tuner.optimizers.base import Optimizer, generator_of, generator_state
from tuner.optimizers.registry import OPTIMIZERS, RandomSearch, load_optimizer, make_optimizer, optimizer_names
from tuner.space import LogBox

BOX = LogBox((WeightSpec("w_rtt", 0.5, 0.05, 2.0, "per ms"), WeightSpec("w_queue", 0.1, 0.05, 0.5, "per token")))
START = {"w_rtt": 0.5, "w_queue": 0.1}

#: Those that other packages offer as well, where they are installed.
every = pytest.mark.parametrize("name", optimizer_names())


def make(name: str, seed: int = 0, budget: int = 50) -> Optimizer:
    return make_optimizer(name, BOX, START, np.random.default_rng(seed), budget=budget)


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
        loaded = load_optimizer(BOX, json.loads(json.dumps(kept.state())))
        assert loaded.state() == kept.state()
        assert (loaded.sigma, loaded.incumbent, loaded.stop()) == (kept.sigma, kept.incumbent, kept.stop())
        assert steps(loaded, 8) == steps(load_optimizer(BOX, kept.state()), 8)
        loaded = load_optimizer(BOX, json.loads(json.dumps(kept.state())))
        assert loaded.ask() == kept.ask()
        kept.tell(kept.ask(), cost(kept.ask()))


@every
def test_options_come_back_with_the_state(name: str) -> None:
    steps_of_es = {"sigma0": 0.3, "sigma_min": 0.1, "damping": 3.0, "patience": 4}
    options = {"es": steps_of_es, "es-probes": steps_of_es, "es-published": steps_of_es, "cma": {"population": 4}}
    kept = make_optimizer(name, BOX, START, np.random.default_rng(0), budget=9)
    if name in options:
        kept = OPTIMIZERS[name](BOX, START, np.random.default_rng(0), budget=9, **options[name])  # type: ignore[arg-type]
    loaded = load_optimizer(BOX, kept.state())
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
    assert steps(load_optimizer(BOX, optimizer.state()), 9) == steps(optimizer, 9)


@every
def test_a_start_outside_the_box_is_refused(name: str) -> None:
    with pytest.raises(WeightsError, match="w_queue"):
        make_optimizer(name, BOX, {"w_queue": 0.9}, np.random.default_rng(0))


@every
def test_a_budget_of_nothing_is_refused(name: str) -> None:
    with pytest.raises(TunerError, match="budget is 0"):
        make(name, budget=0)


@every
def test_damaged_state_is_refused_with_the_optimizer_s_name(name: str) -> None:
    state = make(name).state()
    for key in ("parent", "rng"):
        with pytest.raises(TunerError, match=f"optimizer '{name}' is damaged"):
            load_optimizer(BOX, {**state, key: None})
    with pytest.raises(TunerError, match=rf"saved optimizer '{name}'\.told is None; expected a whole number from 0"):
        load_optimizer(BOX, {**state, "told": None})
    del state["budget"]
    with pytest.raises(TunerError, match=f"saved optimizer '{name}' has no 'budget'"):
        load_optimizer(BOX, state)


@every
@pytest.mark.parametrize("value", ["much", -1, 10**400, 1e308, float("inf"), float("nan"), True, None, [], {}])
def test_an_edited_number_of_a_state_is_refused_or_leaves_an_optimizer_that_ends(name: str, value: object) -> None:
    state = make(name).state()
    for key, was in state.items():
        if key == "optimizer" or isinstance(was, dict):
            continue
        try:
            loaded = load_optimizer(BOX, {**state, key: value})
        except TunerError:
            continue
        weights = loaded.ask()
        assert all(spec.low <= weights[spec.name] <= spec.high for spec in BOX.specs), key
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
        make_optimizer("adam", BOX, START, np.random.default_rng(0))


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
    assert make_optimizer(name, BOX, START, np.random.default_rng(0)).state()["budget"] == 200
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
    assert {name: type(make_optimizer(name, BOX, START, rng)) for name in ("ant", "zebra", "es")} == {
        "ant": Offered,
        "zebra": Offered,
        "es": OPTIMIZERS["es"],
    }
    assert make_optimizer("ant", BOX, START, rng, budget=7).state()["budget"] == 7
    with pytest.raises(
        TunerError, match="expected one of es, es-probes, es-published, es-released, cma, random, fixed, ant, zebra"
    ):
        make_optimizer("adam", BOX, START, rng)
