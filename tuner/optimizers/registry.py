"""Optimizers by name, as `gorgo tune --algorithm` knows them. A new one is a file and a line here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from gorgo.errors import TunerError
from tuner.optimizers.base import BUDGET, Base, Optimizer
from tuner.optimizers.cma_es import CmaEs
from tuner.optimizers.es import OnePlusOneES
from tuner.optimizers.fixed import Fixed
from tuner.optimizers.random_search import RandomSearch
from tuner.space import LogBox

OPTIMIZERS: dict[str, type[Base]] = {kind.name: kind for kind in (OnePlusOneES, CmaEs, RandomSearch, Fixed)}


def make_optimizer(
    name: str, box: LogBox, start: Mapping[str, float], rng: np.random.Generator, *, budget: int = BUDGET
) -> Optimizer:
    """A new optimizer by its name. Raises `TunerError` for a name that is not registered."""
    try:
        kind = OPTIMIZERS[name]
    except KeyError:
        raise TunerError(f"optimizer {name!r} is unknown; expected one of {', '.join(OPTIMIZERS)}") from None
    return kind(box, start, rng, budget=budget)


def load_optimizer(box: LogBox, state: Mapping[str, Any]) -> Optimizer:
    """The optimizer that `state()` described: its next proposals are those that the saved one would have made.

    Raises `TunerError` for a state of another optimizer, of other weights, or that is damaged.
    """
    optimizer = make_optimizer(str(state.get("optimizer")), box, {}, np.random.default_rng(0))
    optimizer.load(state)
    return optimizer
