"""The learning of a Router: which of its policies learns, the ring of its outcomes, its model's version, and a log.

Owns the interfaces of a trained model, which predicts times of a table of candidates (`Model`), of a policy that learns
(`Learner`) and of a log of outcomes (`OutcomeRecorder`), the settings of a training (`TrainingSpec`), and what connects
them with the Router (`Learning`). Leaves the kinds of models and the training to `gorgo.learning`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from gorgo.core.messages.decision import Decision
from gorgo.core.messages.request import AttemptResult, RouteRequest
from gorgo.core.policy.interface import Candidates, Choice, Policy
from gorgo.core.record import record
from gorgo.core.training.candidate_table import CandidateTable
from gorgo.core.training.outcomes import OutcomeRing, OutcomeRow
from gorgo.errors import ConfigError


class Model(Protocol):
    """One immutable result of a training: parameters, statistics of its samples, version."""

    @property
    def version(self) -> int:
        """The number of the round, from 1."""

    @property
    def kind(self) -> str:
        """As in `TrainingSpec`."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the columns of a table."""

    @property
    def low(self) -> NDArray[np.float32]:
        """Least value of each feature in the training."""

    @property
    def high(self) -> NDArray[np.float32]:
        """Greatest value of each feature in the training."""

    @property
    def samples(self) -> int:
        """Samples of the training."""

    def ttft_s(self, table: NDArray[np.float32]) -> NDArray[np.float64]:
        """Return the predicted time from dispatch to first token of each row, s."""

    def tpot_s(self, table: NDArray[np.float32]) -> NDArray[np.float64] | None:
        """Return the predicted time per output token of each row, s; `None` if the model has none."""

    def arrays(self) -> tuple[dict[str, NDArray[Any]], Mapping[str, Any]]:
        """Return the parameters for a file: arrays by name, and what goes into its JSON header."""


def model_digest(model: Model) -> str:
    """Return 32 hexadecimal digits: the same for models of the same parameters, in whichever process."""
    arrays, parts = model.arrays()
    digest = blake2b(json.dumps([model.kind, model.version, model.names, dict(parts)]).encode(), digest_size=16)
    for name, array in sorted({**arrays, "low": model.low, "high": model.high}.items()):
        digest.update(f"{name} {array.dtype.str} {array.shape} ".encode())
        digest.update(np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


# The settings of a training: kind of model, buffers, rounds.


ModelKind = Literal["mlp", "linear", "trees", "rls", "residual"]
ReplayRule = Literal["coreset", "random", "none", "all"]
StoreKind = Literal["fifo", "stratified"]
TargetKind = Literal["seconds", "log"]


@record
class TrainingSpec:
    """How a policy's model is trained. Defaults are those of the Lodestar paper.

    Parameters
    ----------
    kind:
        `mlp` is the network of Lodestar, `linear` its ablation, `trees` boosted trees, `rls` recursive least squares,
        `residual` the error of a prediction by priors.
    names:
        Features in the order of a row's columns.
    round_samples:
        New samples that start a round.
    round_growth:
        Share of the stored samples that has to be new as well: with it the training of a sample has a bounded cost,
        however many are stored.
    first_samples:
        Samples before the first round.
    fifo, replay:
        Newest samples stored, and older ones that `replay_rule` admits.
    replay_rule:
        `coreset` admits by diversity of gradients; `random` by chance; `none` trains on new samples alone, `all` on
        every one.
    epochs:
        Passes over the samples of a round.
    target_cap_s:
        A longer time to first token counts as this one, s.
    target:
        `seconds` as in the papers, or their logarithm: errors then count as shares of a time. Of kinds `mlp` and
        `trees`.
    store:
        `fifo`, or `stratified` by load (rings per class of queue, KV usage and prefix).
    fit_s:
        Time of a round in a simulation, s of virtual time.
    judged:
        Whether a round's model is adopted only if it predicts the newest held-out rows as well as the one in use.
    """

    kind: ModelKind
    names: tuple[str, ...]
    round_samples: int = 1000
    round_growth: float = 0.0
    first_samples: int = 1000
    fifo: int = 5000
    replay: int = 5000
    replay_rule: ReplayRule = "coreset"
    epochs: int = 20
    target_cap_s: float = 60.0
    target: TargetKind = "seconds"
    store: StoreKind = "fifo"
    fit_s: float = 2.0
    judged: bool = True


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
