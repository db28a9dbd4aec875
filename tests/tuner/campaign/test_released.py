"""Mode `paper` by the optimizer: what it accepts of windows that are all alike, and when it ends."""

from __future__ import annotations

import pytest

from tests.tuner.campaign.driven import driven


@pytest.mark.parametrize(("algorithm", "accepted"), [("es", False), ("es-released", True)])
def test_candidates_without_any_difference_are_accepted_as_released_alone(algorithm: str, accepted: bool) -> None:
    generations = driven(algorithm, [0.4] * 900).generations
    assert len(generations) > 10
    assert {one.accepted for _, one in generations[1:]} == {accepted}


def test_the_released_search_ends_after_16_candidates_and_512_samples() -> None:
    found = driven("es-released", [0.4] * 900)
    numbers = [number for number, _ in found.generations]
    assert len(numbers) == 17
    assert numbers[-1] - numbers[0] == 512
    assert found.stopped == "es-released: 16 candidates, as released"
