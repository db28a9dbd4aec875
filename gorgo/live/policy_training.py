"""The training of the policy that learns, from when there is one: until then nothing of it is loaded."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gorgo.config.model import LearningConfig
from gorgo.core.router import Router
from gorgo.live.event_loop import Clock
from gorgo.live.telemetry.counters import LearningMetrics
from gorgo.live.training_status import TrainingState

if TYPE_CHECKING:
    from gorgo.live.training.service import TrainingService

#: Of the question whether the policy learns, s: another one is set at run time.
INTERVAL_S = 1.0


class PolicyTraining:
    """The training of one proxy.

    Parameters
    ----------
    learning:
        Settings of the configuration; replaced by `configure`.
    state_path:
        The state file, beside which models are; without one no model is written.
    seed:
        Of the training.
    """

    def __init__(
        self,
        router: Router,
        clock: Clock,
        metrics: LearningMetrics,
        learning: LearningConfig,
        state_path: Path | None,
        *,
        seed: int,
    ) -> None:
        self._router = router
        self._clock = clock
        self._metrics = metrics
        self._learning = learning
        self._state_path = state_path
        self._seed = seed
        self._service: TrainingService | None = None
        #: Whether this process trains; of several workers of a router one does.
        self.trains = True
        #: Called with each model that was trained here and is used from now on.
        self.on_adopted: Callable[[bytes], None] = lambda _: None

    def configure(self, learning: LearningConfig) -> None:
        """Train by other settings from the next step on; another model file is read then."""
        self._learning = learning
        if self._service is not None:
            self._service.configure(learning)

    async def start(self) -> None:
        """Load the model before the first request, if the policy has one."""
        if self._router.learning.learner is not None:
            await (await self._loaded()).start()

    async def run(self) -> None:
        """Train until cancelled, from the first policy on that learns."""
        while self._service is None:
            await asyncio.sleep(INTERVAL_S)
            if self._router.learning.learner is not None:
                await (await self._loaded()).step()
        await self._service.run()

    async def take_model(self, data: bytes) -> None:
        """Use a model that another process of this router has trained. Raises `ModelFileError`."""
        await (self._service or await self._loaded()).take_model(data)

    async def aclose(self) -> None:
        """End the process that trains."""
        if self._service is not None:
            await self._service.aclose(save=self.trains)

    def as_dict(self) -> dict[str, Any]:
        """Return the JSON of `GET /admin/model`."""
        if self._service is not None:
            return self._service.as_dict()
        learner = self._router.learning.learner
        return {
            "policy": None if learner is None else learner.name,
            "is_shadow": learner is not None and learner is self._router.settings.shadow,
            "model": None,
            "training": TrainingState().as_dict(None if learner is None else learner.training),
        }

    async def _loaded(self) -> TrainingService:
        await asyncio.to_thread(import_module, "gorgo.live.training.service")  # streams go on meanwhile
        from gorgo.live.training.service import ModelStore, TrainingService

        store = ModelStore(self._state_path)
        self._service = TrainingService(
            self._router, self._clock, self._metrics, self._learning, store, seed=self._seed
        )
        self._service.on_adopted = lambda data: self.on_adopted(data)
        return self._service
