"""Optimizers by name, as `gorgo tune --algorithm` knows them: the ones here, and those that other packages offer.

Owns the names, and the two optimizers that are controls: `Fixed`, which never moves, and `RandomSearch`.

A new optimizer is a file, a line below, and its name in `gorgo.cli.tune`. Another package adds one by an entry point
in the group `gorgo.optimizers`: its name is the optimizer's, its object a class made as `BaseOptimizer` is. It cannot
replace a built-in name.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from typing import Any, ClassVar

import numpy as np

from gorgo.errors import TunerError
from tuner.optimizers.base import BUDGET, BaseOptimizer, Optimizer
from tuner.optimizers.cma_es import CmaEs
from tuner.optimizers.es import OnePlusOneES, ProbingES, PublishedES, ReleasedES
from tuner.space import LogBox

# A campaign with it shows what is measured when nothing changes: its noise and its false alarms.


class Fixed(BaseOptimizer):
    """Proposes its start, always."""

    name: ClassVar[str] = "fixed"

    def _propose(self) -> tuple[float, ...]:
        return self._parent


# Random search is the control that every other optimizer has to beat.


class RandomSearch(BaseOptimizer):
    """Every proposal is drawn anew, whatever was told; the best accepted one is the incumbent.

    References
    ----------
    Bergstra and Bengio, "Random Search for Hyper-Parameter Optimization", JMLR 13, 2012.
    """

    name: ClassVar[str] = "random"

    def _propose(self) -> tuple[float, ...]:
        return tuple(self._rng.uniform(self.box.low, self.box.high).tolist())


ENTRY_POINTS = "gorgo.optimizers"

_BUILT_IN: tuple[type[BaseOptimizer], ...] = (
    OnePlusOneES,
    ProbingES,
    PublishedES,
    ReleasedES,
    CmaEs,
    RandomSearch,
    Fixed,
)
OPTIMIZERS: dict[str, type[BaseOptimizer]] = {kind.name: kind for kind in _BUILT_IN}


def optimizer_names() -> list[str]:
    """Every name that `make_optimizer` knows, this package's first."""
    others = {found.name for found in entry_points(group=ENTRY_POINTS)} - set(OPTIMIZERS)
    return [*OPTIMIZERS, *sorted(others)]


def make_optimizer(
    name: str, box: LogBox, start: Mapping[str, float], rng: np.random.Generator, *, budget: int = BUDGET
) -> Optimizer:
    """A new optimizer by its name. Raises `TunerError` for a name that nobody has."""
    return _kind(name)(box, start, rng, budget=budget)


def _kind(name: str) -> Callable[..., Optimizer]:
    if name in OPTIMIZERS:
        return OPTIMIZERS[name]
    for offered in entry_points(group=ENTRY_POINTS, name=name):
        kind: Callable[..., Optimizer] = offered.load()
        return kind
    raise TunerError(f"optimizer {name!r} is unknown; expected one of {', '.join(optimizer_names())}")


def load_optimizer(box: LogBox, state: Mapping[str, Any]) -> Optimizer:
    """The optimizer that `state()` described: its next proposals are those that the saved one would have made.

    Raises `TunerError` for a state of another optimizer, of other weights, or that is damaged.
    """
    optimizer = make_optimizer(str(state.get("optimizer")), box, {}, np.random.default_rng(0))
    optimizer.load(state)
    return optimizer
