"""Never moves: what a campaign measures when nothing changes, its noise and its false alarms."""

from __future__ import annotations

from typing import ClassVar

from tuner.optimizers.base import BaseOptimizer


class Fixed(BaseOptimizer):
    """Proposes its start, always."""

    name: ClassVar[str] = "fixed"

    def _propose(self) -> tuple[float, ...]:
        return self._parent
