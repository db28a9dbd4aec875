"""A linear model as tests write it: a factor per feature, bounds that admit everything unless given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gorgo.core.numeric import Floats


class LinearFake:
    """TTFT = constant + sum of factor * feature.

    Parameters
    ----------
    names:
        Features of the policy.
    factors:
        By feature; others are 0.
    tpot:
        Factors of the time per token; `None` is no model of it.
    low, high:
        Bounds by feature; others admit any value.
    """

    version, kind = 1, "linear"

    def __init__(
        self,
        names: tuple[str, ...],
        factors: Mapping[str, float],
        *,
        constant: float = 0.0,
        tpot: Mapping[str, float] | None = None,
        low: Mapping[str, float] | None = None,
        high: Mapping[str, float] | None = None,
        samples: int = 10_000,
    ) -> None:
        self.names = names
        self.samples = samples
        self.low = np.array([(low or {}).get(name, -1e30) for name in names], np.float32)
        self.high = np.array([(high or {}).get(name, 1e30) for name in names], np.float32)
        self._constant = constant
        self._factors, self._tpot = self._row(factors), None if tpot is None else self._row(tpot)

    def ttft_s(self, table: NDArray[np.float32]) -> Floats:
        return self._constant + table.astype(np.float64) @ self._factors

    def tpot_s(self, table: NDArray[np.float32]) -> Floats | None:
        return None if self._tpot is None else table.astype(np.float64) @ self._tpot

    def arrays(self) -> tuple[dict[str, NDArray[Any]], Mapping[str, Any]]:
        return {}, {}

    def _row(self, factors: Mapping[str, float]) -> Floats:
        assert set(factors) <= set(self.names)
        return np.array([factors.get(name, 0.0) for name in self.names])


class BrokenFake(LinearFake):
    """A model that raises, or answers what is no number."""

    def __init__(self, names: tuple[str, ...], answer: float | None = None) -> None:
        super().__init__(names, {})
        self._answer = answer

    def ttft_s(self, table: NDArray[np.float32]) -> Floats:
        if self._answer is None:
            raise RuntimeError("model file is damaged")
        return np.full(len(table), self._answer)
