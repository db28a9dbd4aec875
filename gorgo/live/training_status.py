"""What `GET /admin/model` shows: the model in use and the state of its training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from gorgo.core.training.model import Model, TrainingSpec


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
    #: Processes that failed, and why the last one did.
    failures: int = 0
    failure: str | None = None
    pid: int | None = None

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
    if model is None:
        return f"{policy} has no model: {training['taken']:,} outcomes; {state}"
    error = "" if model["error_ttft"] is None else f", TTFT off by {100 * model['error_ttft']:.0f} % where held out"
    facts = f"model {model['version']} ({model['kind']}) of {model['samples']:,} outcomes, {model['age_s']:.0f} s old"
    return f"{policy} learned: {facts}{error}; {state}"
