"""The learning of a Router: which of its policies learns, the ring of its outcomes, its model's version, and a log."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gorgo.core.messages.request import RouteRequest
from gorgo.core.policy.candidates import Candidates
from gorgo.core.policy.choice import Choice
from gorgo.core.policy.interface import Policy
from gorgo.core.training.learner import Learner, find_learner
from gorgo.core.training.model import Model, model_digest
from gorgo.core.training.outcomes import OutcomeRing
from gorgo.core.training.recorder import OutcomeRecorder
from gorgo.errors import ConfigError


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
        own = choice if shadowed is None or shadowed.features is None else shadowed
        return learner.features(request, candidates) if own.features is None else own.features
