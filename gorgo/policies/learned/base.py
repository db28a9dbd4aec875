"""The part that all learned policies share: the settings of their training, and the model in use."""

from __future__ import annotations

from gorgo.core.arrays import Table
from gorgo.core.messages.request import RouteRequest
from gorgo.core.policy.candidates import Candidates
from gorgo.core.training.features import feature_table
from gorgo.core.training.model import Model
from gorgo.core.training.spec import TrainingSpec
from gorgo.errors import ConfigError


class LearnedPolicy:
    """Settings and model.

    Parameters
    ----------
    training:
        With the features of the policy. An experiment varies it; the policy reads the names alone.
    """

    def __init__(self, training: TrainingSpec) -> None:
        self.training = training
        self.feature_names = training.names
        self._model: Model | None = None

    def features(self, request: RouteRequest, candidates: Candidates) -> Table:
        """Return a row per candidate."""
        return feature_table(self.feature_names, request, candidates)

    def adopt(self, model: Model | None) -> None:
        """Choose by `model` from the next decision on, or without one.

        Raises `ConfigError` for a model of other features. The trainer waits for `first_samples`.
        """
        if model is not None and model.names != self.feature_names:
            raise ConfigError(
                f"model {model.version} has the features {', '.join(model.names)}; "
                f"expected {', '.join(self.feature_names)}"
            )
        self._model = model
