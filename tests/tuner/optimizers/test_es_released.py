"""The released (1+1)-ES: its rule by hand. `tests/system/released` compares it step for step with the package."""

from __future__ import annotations

import numpy as np
import pytest

from gorgo.core.policy.weights import WeightSpec
from tuner.optimizers.es_released import ReleasedES
from tuner.space import LogBox

BOX = LogBox((WeightSpec("w_rtt", 0.5, 0.05, 2.0, "per ms"), WeightSpec("w_queue", 0.1, 0.05, 0.5, "per token")))


def judged(*accepted: bool) -> ReleasedES:
    optimizer = ReleasedES(BOX, {}, np.random.default_rng(0))
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
