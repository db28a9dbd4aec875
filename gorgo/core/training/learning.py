"""The learning of a Router: which of its policies learns, the ring of its outcomes, its model's version, and a log.

Owns the interfaces of a policy that learns (`Learner`) and of a log of outcomes (`OutcomeRecorder`), and what connects
them with the Router (`Learning`). Leaves the training to `gorgo.learning`.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from gorgo.core.messages.decision import Decision
from gorgo.core.messages.request import AttemptResult, RouteRequest
from gorgo.core.policy.interface import Candidates, Choice, Policy
from gorgo.core.record import record
from gorgo.core.training.candidate_table import CandidateTable
from gorgo.core.training.model import Model, TrainingSpec, model_digest
from gorgo.core.training.outcomes import OutcomeRing, OutcomeRow
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
class NeedsPackages(Protocol):
    """A learner whose training needs packages that the Router runs without."""

    def require_packages(self) -> None:
        """Raise `MissingExtra` if one is not installed."""


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
    """Return which of the two learns, if any.

    Raises `ConfigError` if both do, as a Router trains one model, and `MissingExtra` if a package of its training is
    not installed: no other kind of model takes its place unsaid.
    """
    learners = [each for each in (policy, shadow) if isinstance(each, Learner)]
    if len(learners) > 1:
        raise ConfigError(
            f"policy {policy.name!r} and shadow policy {learners[1].name!r} both learn, and a router trains one model; "
            "expected at most one of them that learns"
        )
    for learner in learners:
        if isinstance(learner, NeedsPackages):
            learner.require_packages()
    return learners[0] if learners else None


@record
class RecordedOutcome:
    """An ended attempt.

    Parameters
    ----------
    decision:
        With the candidates and the row chosen.
    candidates:
        What the policy saw of them.
    probability:
        The chance with which the replica was chosen; `None` where it is not known.
    result:
        How it ended.
    e2e_s:
        From its dispatch to its end.
    row:
        Its times for a training; `None` for an end that says nothing of the time to a first token.
    """

    decision: Decision
    candidates: CandidateTable
    probability: float | None
    result: AttemptResult
    e2e_s: float
    row: OutcomeRow | None


class OutcomeRecorder(Protocol):
    """Takes outcomes, as part of an event, so it waits for nothing."""

    def record_outcome(self, outcome: RecordedOutcome) -> None:
        """Take one ended attempt."""


class Learning:
    """At most one learner, with what it is trained on. Without one nothing is written.

    Parameters
    ----------
    policy, shadow:
        Of the Router. Raises `ConfigError` if both learn.
    """

    __slots__ = (
        "_digest", "_model", "_policies_read_progress", "learner", "model_version", "names", "outcomes", "recorder",
    )  # fmt: skip

    def __init__(self, policy: Policy, shadow: Policy | None) -> None:
        #: A log of outcomes, whether or not a policy learns.
        self.recorder: OutcomeRecorder | None = None
        self.learner: Learner | None = None
        #: Names of the learner's features.
        self.names: tuple[str, ...] = ()
        #: Outcomes of the learner's decisions; a new ring for each learner.
        self.outcomes: OutcomeRing | None = None
        #: Version of the model in use; `None` without one.
        self.model_version: int | None = None
        self._model: Model | None = None
        self._digest: str | None = None
        self.set_policies(policy, shadow)

    def set_policies(self, policy: Policy, shadow: Policy | None) -> None:
        """Find the learner of the two. One that stays retains its outcomes. Raises as the constructor does."""
        learner = find_learner(policy, shadow)
        self._policies_read_progress = any(getattr(each, "reads_progress", False) for each in (policy, shadow))
        if learner is not self.learner:
            self.learner, self.model_version, self._model, self._digest = learner, None, None, None
            self.names = () if learner is None else learner.feature_names
            self.outcomes = None if learner is None else OutcomeRing(self.names)

    @property
    def reads_progress(self) -> bool:
        """Whether something reads what replicas prefill and decode."""
        return self.learner is not None or self.recorder is not None or self._policies_read_progress

    def adopt(self, model: Model | None) -> None:
        """Let the learner choose by `model`. Raises `ConfigError` without a learner or for other features."""
        learner = self.learner
        if learner is None:
            raise ConfigError("no policy here learns, so none can adopt a model; expected a policy that learns")
        if model is not None and model.names != self.names:
            raise ConfigError(
                f"the model was trained on {', '.join(model.names)}; policy {learner.name!r} expects: "
                f"{', '.join(self.names)}"
            )
        learner.adopt(model)
        self.model_version, self._model, self._digest = None if model is None else model.version, model, None

    @property
    def model_digest(self) -> str | None:
        """Return the digest of the model in use; `None` without one."""
        if self._digest is None and self._model is not None:
            self._digest = model_digest(self._model)
        return self._digest

    def table_of(
        self, choice: Choice, shadowed: Choice | None, request: RouteRequest, candidates: Candidates
    ) -> NDArray[np.float32] | None:
        """Return the learner's table of a decision with the shadow's choice; `None` without a learner.

        A learner may have chosen without making a table.
        """
        learner = self.learner
        if learner is None:
            return None
        learners_choice = choice if shadowed is None or shadowed.features is None else shadowed
        return learner.features(request, candidates) if learners_choice.features is None else learners_choice.features
