"""Training in virtual time: a controller reads the Router's outcomes, trains a model, and lets the Router adopt it.

Theory of operation. Once a second of virtual time the outcomes that are new go to the trainer. When a round is due its
model is fitted at once, from what was known then, and adopted after the virtual time that a training is stated to take
(`TrainingSpec.fit_s`). So decisions depend on the seed alone and not on the speed of the machine. A round whose model
is worse than the one in use leaves that one. Frozen weights stop rounds and adoptions; outcomes are still read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Protocol

from gorgo.core.router import Router
from gorgo.core.training.learning import Model, TrainingSpec
from gorgo.core.training.outcomes import OutcomeRing, TrainingRows

#: Virtual time from one read of outcomes to the next, s.
INTERVAL_S = 1.0


class RoundTrainer(Protocol):
    """The rounds of one training."""

    def add(self, rows: TrainingRows) -> None: ...

    def due(self) -> bool: ...

    def train(self) -> Model | None: ...


#: Makes the trainer of a policy by its settings, the seed, and the model before the first round.
TrainerFactory = Callable[[TrainingSpec, int, Model | None], RoundTrainer]


@dataclass(frozen=True, slots=True)
class TrainingRound:
    """One round: its model and when it was trained and adopted. A round that was frozen is never adopted."""

    model: Model
    started_s: float
    adopted_s: float | None


class TrainingController:
    """Trains the learner of a simulation.

    Parameters
    ----------
    make_trainer:
        Makes a new trainer for each policy that learns.
    seed:
        Of the trainings.
    model:
        Adopted at the start, as one trained on another fleet; `None` is a cold start.
    until_s:
        No round starts later: the model is frozen then.
    """

    def __init__(
        self, make_trainer: TrainerFactory, *, seed: int, model: Model | None = None, until_s: float = inf
    ) -> None:
        self._make_trainer = make_trainer
        self._seed = seed
        self._model = model
        self._until_s = until_s
        self._ring: OutcomeRing | None = None
        self._trainer: RoundTrainer | None = None
        self._next_seq = 0
        #: A fitted model, when its round started, and when it is adopted.
        self._fitted: tuple[Model, float, float] | None = None
        self._next_read_s = 0.0
        #: Rounds that have ended with a model.
        self.rounds: list[TrainingRound] = []

    @property
    def next_s(self) -> float | None:
        """When to act next: at the next read of outcomes, or when a model is adopted."""
        return self._next_read_s if self._fitted is None else min(self._next_read_s, self._fitted[2])

    def act(self, router: Router, now: float) -> None:
        """Read outcomes, start a round, or let the Router adopt its model."""
        if router.learning.outcomes is not self._ring:
            self._begin(router)
        if self._fitted is not None and now >= self._fitted[2]:
            self._adopt(router, now)
        if now >= self._next_read_s:
            self._next_read_s += INTERVAL_S
            self._read(router, now)

    # -- helpers

    def _begin(self, router: Router) -> None:
        """Train another policy, or none."""
        self._ring, self._fitted, self._next_seq = router.learning.outcomes, None, 0
        learner = router.learning.learner
        self._trainer = None if learner is None else self._make_trainer(learner.training, self._seed, self._model)
        if learner is not None and self._model is not None:
            router.learning.adopt(self._model)

    def _read(self, router: Router, now: float) -> None:
        if self._ring is None or self._trainer is None or router.learning.learner is None:
            return
        rows = self._ring.since(self._next_seq)
        self._next_seq = rows.first_seq + len(rows)
        if len(rows):
            self._trainer.add(rows)
        if self._fitted is None and not router.settings.frozen and now <= self._until_s and self._trainer.due():
            model = self._trainer.train()
            if model is not None:
                self._fitted = model, now, now + router.learning.learner.training.fit_s

    def _adopt(self, router: Router, now: float) -> None:
        assert self._fitted is not None, "a round has ended"
        model, started_s, _ = self._fitted
        self._fitted = None
        if not router.settings.frozen:
            router.learning.adopt(model)
        self.rounds.append(TrainingRound(model, started_s, None if router.settings.frozen else now))
