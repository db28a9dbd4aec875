"""Random search: log-uniform in the whole box. The control that every other optimizer has to beat."""

from __future__ import annotations

from typing import ClassVar

from tuner.optimizers.base import BaseOptimizer


class RandomSearch(BaseOptimizer):
    """Every proposal is drawn anew, whatever was told; the best accepted one is the incumbent.

    References
    ----------
    Bergstra and Bengio, "Random Search for Hyper-Parameter Optimization", JMLR 13, 2012.
    """

    name: ClassVar[str] = "random"

    def _propose(self) -> tuple[float, ...]:
        return tuple(self._rng.uniform(self.box.low, self.box.high).tolist())
