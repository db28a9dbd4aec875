"""Probes before the ES: where they go, when a direction ends, and what remains of them in a saved state."""

from __future__ import annotations

from math import log
from typing import Any

import numpy as np
import pytest

from gorgo.core.policy.weights import WeightSpec
from gorgo.errors import TunerError
from tuner.optimizers.es import SIGMA0, OnePlusOneES
from tuner.optimizers.es_probes import ProbingES
from tuner.optimizers.registry import load_optimizer
from tuner.space import LogBox

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
