"""The model of a policy that learns, in a line."""

from __future__ import annotations

from typing import Any

import pytest

from gorgo.live.training_status import TrainingState, model_line

MODEL = {"version": 4, "kind": "mlp", "samples": 5000, "age_s": 12.4, "error_ttft": 0.073}
LEARNED, COLD = "lodestar learned: model 4 (mlp) of 5,000 outcomes, 12 s old", "lodestar has no model: 1,200 outcomes"


@pytest.mark.parametrize(
    ("policy", "model", "training", "line"),
    [
        (None, None, TrainingState(), None),
        (
            "lodestar",
            None,
            TrainingState("waiting", taken=1200),
            f"{COLD}; training waiting",
        ),
        (
            "lodestar",
            MODEL | {"error_e2e": 0.2},
            TrainingState("waiting", first_tokens=900, whole_answers=1250, censored=50, refused=3),
            f"{LEARNED}, TTFT off by 7 %, whole answers off by 20 % where held out; training waiting, from 900 first "
            "tokens, 1,250 whole answers by the time to their end, 50 without an answer; 3 rounds left the better "
            "model in use",
        ),
        (
            "lodestar",
            MODEL,
            TrainingState("frozen"),
            f"{LEARNED}, TTFT off by 7 % where held out; training frozen",
        ),
        (
            "lodestar",
            MODEL | {"error_ttft": None},
            TrainingState("failed", failure="the training process ended"),
            f"{LEARNED}; training failed (the training process ended)",
        ),
    ],
)
def test_a_line_has_the_model_and_the_state_of_its_training(
    policy: str | None, model: dict[str, Any] | None, training: TrainingState, line: str | None
) -> None:
    assert model_line({"policy": policy, "model": model, "training": training.as_dict(None)}) == line
