"""The interface of a policy that learns: its features, its training, and the model that it uses."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from gorgo.core.messages.request import RouteRequest
from gorgo.core.policy.candidates import Candidates
from gorgo.core.policy.interface import Policy
from gorgo.core.training.model import Model
from gorgo.core.training.spec import TrainingSpec
from gorgo.errors import ConfigError


@runtime_checkable
class Learner(Policy, Protocol):
    """A policy with a model. Without one it chooses by a rule of its own."""

    #: How its model is trained; a shell may replace it by one of the same kind and names.
    training: TrainingSpec

    @property
    def feature_names(self) -> tuple[str, ...]:
        """Names of the columns of `features`."""

    def features(self, request: RouteRequest, candidates: Candidates) -> NDArray[np.float32]:
        """Return a row per candidate."""

    def adopt(self, model: Model | None) -> None:
        """Choose by `model` from the next decision on, or without one."""


@runtime_checkable
class HasBase(Protocol):
    """A model of a prediction by priors, whose correction has a part that holds out of the training's range too."""

    @property
    def prior_error(self) -> float:
        """Return the mean error of the priors in the training, as a share of the measured times."""

    def base_s(self, table: NDArray[np.float32]) -> NDArray[np.float64]:
        """Return the time to first token of each row by priors and that part, s."""


def find_base(model: Model | None) -> HasBase | None:
    """Return the model if it corrects priors."""
    return model if isinstance(model, HasBase) else None


def find_learner(policy: Policy, shadow: Policy | None) -> Learner | None:
    """Return which of the two learns, if any. Raise `ConfigError` if both do: a Router trains one model."""
    learners = [each for each in (policy, shadow) if isinstance(each, Learner)]
    if len(learners) > 1:
        raise ConfigError(
            f"policy {policy.name!r} and shadow policy {learners[1].name!r} both learn, and a router trains one model; "
            "expected at most one of them that learns"
        )
    return learners[0] if learners else None
