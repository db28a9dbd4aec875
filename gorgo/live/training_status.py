"""What `GET /admin/model` shows: the model in use and the state of its training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from gorgo.core.training.learning import Model, TrainingSpec
from gorgo.core.training.outcomes import TrainingRows


@dataclass(frozen=True, slots=True)
class ModelInUse:
    """A model with its origin.

    `trained_s` is seconds since the epoch. `file` has it, or `None` while no file does. `report` is the trainer's, and
    empty for a model that was read from a file.
    """

    model: Model
    trained_s: float
    file: Path | None
    report: Mapping[str, Any] = field(default_factory=dict)
    seconds: float | None = None

    def as_dict(self, now: float) -> dict[str, Any]:
        """Return the fields as JSON; errors are those of rows that no round trained on."""
        model, report = self.model, self.report
        return {
            "kind": model.kind,
            "version": model.version,
            "samples": model.samples,
            "features": {
                name: [float(low), float(high)]
                for name, low, high in zip(model.names, model.low, model.high, strict=True)
            },
            "trained_s": self.trained_s,
            "age_s": max(0.0, now - self.trained_s),
            "training_seconds": self.seconds,
            "error_ttft": report.get("ttft_mape"),
            "error_tpot": report.get("tpot_mape"),
            "error_e2e": report.get("e2e_mape"),
            "tested": report.get("tested"),
            "file": None if self.file is None else str(self.file),
        }


@dataclass(slots=True)
class TrainingState:
    """The training of one proxy."""

    #: `off` without a policy that learns or by the configuration, `frozen`, `waiting` for outcomes, `training`,
    #: `failed` until the next process.
    state: str = "off"
    #: Outcomes that the process has, and those that were lost.
    taken: int = 0
    lost: int = 0
    #: Of those taken: with a first token, answers in one piece with the time to their end, and those without an answer.
    first_tokens: int = 0
    whole_answers: int = 0
    censored: int = 0
    #: Rounds whose model was worse than the one in use, which stayed.
    refused: int = 0
    #: Processes that failed, and why the last one did.
    failures: int = 0
    failure: str | None = None
    pid: int | None = None

    def count_taken(self, rows: TrainingRows, lost: int) -> None:
        """Count outcomes that the process gets, and those that were lost before."""
        censored, whole = int(np.sum(rows.censored)), int(np.sum(rows.unstreamed & ~rows.censored))
        self.taken += len(rows)
        self.lost += lost
        self.censored += censored
        self.whole_answers += whole
        self.first_tokens += len(rows) - censored - whole

    def as_dict(self, spec: TrainingSpec | None) -> dict[str, Any]:
        """Return the fields as JSON, with the settings of the training."""
        settings = {} if spec is None else asdict(spec)
        settings.pop("names", None)
        settings.pop("fit_s", None)  # of simulations
        return asdict(self) | {"settings": settings or None}


def model_line(shown: Mapping[str, Any]) -> str | None:
    """Return the JSON of `GET /admin/model` as a line; `None` if no policy learns."""
    policy, model, training = shown["policy"], shown["model"], shown["training"]
    if policy is None:
        return None
    state = f"training {training['state']}" + ("" if training["failure"] is None else f" ({training['failure']})")
    state += _learned_from(training)
    if model is None:
        return f"{policy} has no model: {training['taken']:,} outcomes; {state}"
    errors = {"TTFT": model["error_ttft"], "whole answers": model.get("error_e2e")}
    known = [f"{name} off by {100 * error:.0f} %" for name, error in errors.items() if error is not None]
    error = f", {', '.join(known)} where held out" if known else ""
    facts = f"model {model['version']} ({model['kind']}) of {model['samples']:,} outcomes, {model['age_s']:.0f} s old"
    return f"{policy} learned: {facts}{error}; {state}"


def _learned_from(training: Mapping[str, Any]) -> str:
    """Return what the outcomes are: streams teach the time to a first token, answers in one piece that to their end."""
    counts = {
        "first tokens": training.get("first_tokens"),  # an older proxy does not say
        "whole answers by the time to their end": training.get("whole_answers"),
        "without an answer": training.get("censored"),
    }
    words = [f"{count:,} {name}" for name, count in counts.items() if count]
    refused = training.get("refused")
    line = f", from {', '.join(words)}" if words else ""
    return line + (f"; {refused:,} rounds left the better model in use" if refused else "")
