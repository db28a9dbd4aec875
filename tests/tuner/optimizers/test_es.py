"""The (1+1)-ES: its steps, its rule, where it stops, and how it begins again."""

from __future__ import annotations

from math import exp, log
from typing import Any

import numpy as np
import pytest

from gorgo.core.policy.weights import WeightSpec
from gorgo.errors import TunerError
from tuner.optimizers.es import SIGMA0, OnePlusOneES, ProbingES, ReleasedES
from tuner.optimizers.registry import load_optimizer
from tuner.space import LogBox

WIDE = LogBox(tuple(WeightSpec(name, 1.0, 1e-9, 1e9, "any") for name in ("a", "b")))
NARROW = LogBox((WeightSpec("a", 1.0, 0.9, 1.1, "any"), WeightSpec("b", 1.0, 0.5, 2.0, "any")))


def es(box: LogBox = WIDE, *, seed: int = 0, **options: float) -> OnePlusOneES:
    return OnePlusOneES(box, {}, np.random.default_rng(seed), **options)  # type: ignore[arg-type]


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
