"""What an optimizer is, and what all of them share: one proposal at a time, a budget, a state that is JSON.

Owns the seam. What a value means, how it was measured and whether a proposal is accepted is the campaign's.

Theory of operation: `ask` draws a proposal and keeps it until `tell` has its value; asking again in between gives the
same one, so that a process killed between the two continues with what it was measuring. All chance comes from one numpy
generator whose state is part of `state()`; whoever loads that goes on with exactly the same proposals.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Any, ClassVar, Protocol

import numpy as np

from gorgo.errors import TunerError
from tuner.saved_fields import SavedFields
from tuner.space import LogBox

#: Evaluations after which an optimizer stops by itself. At the campaign's usual hour each this is more than a week.
BUDGET = 200
#: Values further apart than this are the same weights; a way through log space and back costs a few ulps.
SAME = 1e-9


class Optimizer(Protocol):
    """Proposes weights and is told what they cost. Costs are positive, lower is better."""

    name: ClassVar[str]
    #: Share by which a candidate may be worse and still be accepted, where one window is compared with another.
    tolerance: ClassVar[float]
    box: LogBox

    @property
    def sigma(self) -> float | None:
        """Step size in log space; None where there is none."""
        ...

    @property
    def incumbent(self) -> dict[str, float]:
        """The best accepted weights."""
        ...

    def ask(self) -> dict[str, float]:
        """Weights to try next; the same ones until they have been told."""
        ...

    def tell(self, weights: Mapping[str, float], value: float, *, accepted: bool | None = None) -> None:
        """What the asked weights cost. `accepted` is the verdict of a better test than comparing two numbers.

        Raises `TunerError` for a value that is not finite, or for weights that were not asked.
        """
        ...

    def tell_incumbent(self, value: float) -> None:
        """The incumbent's cost, measured again: a lucky window must not reign for ever."""
        ...

    def recentre(self, weights: Mapping[str, float]) -> None:
        """Begin again from other weights, with the first step size; the budget goes on. Drops what was asked."""
        ...

    def stop(self) -> str | None:
        """Why there is nothing more to ask, in words; None while there is."""
        ...

    def state(self) -> dict[str, Any]:
        """All of it as JSON; the registry's `load_optimizer` makes an equal one from it."""
        ...

    def load(self, state: Mapping[str, Any]) -> None:
        """Become what `state` says. Raises `TunerError` where that is no state of this optimizer."""
        ...


#: Of a saved state: a step over more than this is outside every box.
MAX_SIGMA = 1e6


class BaseOptimizer:
    """The bookkeeping that optimizers share.

    Parameters
    ----------
    box:
        The weights to move.
    start:
        Where to begin; a weight that is missing is at its default. Raises `WeightsError` outside the box.
    rng:
        The only source of chance. Its state is saved and restored, so it should belong to this optimizer alone.
    budget:
        Evaluations after which `stop` says so.
    """

    name: ClassVar[str]
    tolerance: ClassVar[float] = 0.0

    def __init__(
        self, box: LogBox, start: Mapping[str, float], rng: np.random.Generator, *, budget: int = BUDGET
    ) -> None:
        if budget < 1:
            raise TunerError(f"budget is {budget!r}; expected a number of evaluations, 1 or more")
        self.box = box
        self.budget = budget
        self.observed = 0
        self.incumbent_value: float | None = None
        self._rng = rng
        self._parent = box.to_log(start)
        self._asked: tuple[float, ...] | None = None

    @property
    def sigma(self) -> float | None:
        return None

    @property
    def incumbent(self) -> dict[str, float]:
        return self.box.from_log(self._parent)

    def ask(self) -> dict[str, float]:
        if self._asked is None:
            self._asked = self._propose()
        return self.box.from_log(self._asked)

    def tell(self, weights: Mapping[str, float], value: float, *, accepted: bool | None = None) -> None:
        point = self._told_point(weights)
        finite(value)
        better = self.incumbent_value is None or value < self.incumbent_value if accepted is None else accepted
        self._asked = None
        self.observed += 1
        if better:
            self._parent, self.incumbent_value = point, value
        self._scored(value)
        self._judged(better=better)

    def tell_incumbent(self, value: float) -> None:
        self.incumbent_value = finite(value)

    def recentre(self, weights: Mapping[str, float]) -> None:
        self._parent = self.box.to_log(weights)
        self._asked = None
        self.incumbent_value = None

    def stop(self) -> str | None:
        return f"budget of {self.budget} evaluations is spent" if self.observed >= self.budget else None

    def state(self) -> dict[str, Any]:
        return {
            "optimizer": self.name,
            "weights": [spec.name for spec in self.box.specs],
            "budget": self.budget,
            "told": self.observed,
            "parent": list(self._parent),
            "incumbent_value": self.incumbent_value,
            "asked": None if self._asked is None else list(self._asked),
            "rng": generator_state(self._rng),
        } | self._more()

    def load(self, state: Mapping[str, Any]) -> None:
        names = [spec.name for spec in self.box.specs]
        if state.get("optimizer") != self.name or state.get("weights") != names:
            search = f"{state.get('optimizer')!r} over {state.get('weights')!r}"
            raise TunerError(f"saved optimizer is {search}; expected {self.name!r} over {names!r}")
        try:
            saved = SavedFields(state, f"saved optimizer {self.name!r}")
            self.budget, self.observed = saved.count("budget", least=1), saved.count("told")
            self._parent = _point(state["parent"], len(names))
            self.incumbent_value = None if state["incumbent_value"] is None else finite(state["incumbent_value"])
            self._asked = None if state["asked"] is None else _point(state["asked"], len(names))
            self._rng = generator_of(state["rng"])
            self._load_more(state)
        except (LookupError, TypeError, ValueError, OverflowError) as error:
            raise TunerError(f"saved state of optimizer {self.name!r} is damaged: {error!r}") from error

    # -- what an optimizer adds

    def _propose(self) -> tuple[float, ...]:
        raise NotImplementedError

    def _scored(self, value: float) -> None:
        """After a value was told; the incumbent is already moved."""

    def _judged(self, *, better: bool) -> None:
        """After that: whether it was a success."""

    def _more(self) -> dict[str, Any]:
        return {}

    def _load_more(self, state: Mapping[str, Any]) -> None:
        """Its own part of the state."""

    # -- helpers

    def _told_point(self, weights: Mapping[str, float]) -> tuple[float, ...]:
        """The point that was asked for these weights."""
        asked = None if self._asked is None else self.box.from_log(self._asked)
        if asked is None or any(abs(weights.get(name, np.inf) - value) > SAME for name, value in asked.items()):
            raise TunerError(f"told about {dict(weights)!r}; expected what was asked: {asked!r}")
        assert self._asked is not None, "there are asked weights only with their point"
        return self._asked


def finite(value: float) -> float:
    """`value` as it is. Raises `TunerError` for NaN, infinity and what is no number: no cost to learn from."""
    if not isinstance(value, int | float) or not isfinite(value):
        raise TunerError(f"told the value {value!r}; expected a finite number")
    return float(value)


def generator_state(rng: np.random.Generator) -> dict[str, Any]:
    """As JSON. Integers of 128 bits are written as text, which every JSON reader keeps whole."""
    raw = rng.bit_generator.state
    if raw["bit_generator"] != "PCG64":
        raise TunerError(f"generator is {raw['bit_generator']}; expected PCG64, as numpy.random.default_rng gives")
    words = {name: str(word) for name, word in raw["state"].items()}
    return {"state": words, "has_uint32": raw["has_uint32"], "uinteger": raw["uinteger"]}


def generator_of(state: Mapping[str, Any]) -> np.random.Generator:
    """The generator that `generator_state` described."""
    words = {name: int(word) for name, word in state["state"].items()}
    raw: Any = {"bit_generator": "PCG64", "state": words}
    raw |= {name: int(state[name]) for name in ("has_uint32", "uinteger")}
    bits = np.random.PCG64()
    bits.state = raw
    return np.random.Generator(bits)


def _point(values: Any, size: int) -> tuple[float, ...]:
    point = tuple(finite(value) for value in values)
    if len(point) != size:
        raise ValueError(f"{len(point)} coordinates where {size} were expected")
    return point
