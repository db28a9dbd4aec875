"""Weights of a cost: what a policy declares, and one versioned set of values.

Owns the box and its checks. The tuner works in the same box through `tuner.space`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from math import isfinite
from typing import Literal

from gorgo.errors import WeightsError, closest


@dataclass(frozen=True, slots=True)
class WeightSpec:
    """One weight that a policy has: start value, box, what it multiplies, and whether a tuner may move it.

    `opt_in` is a preference to set, not a value to discover: a tuner moves it only by an option. `no` may have a box
    that includes 0.
    """

    name: str
    default: float
    low: float
    high: float
    description: str
    tunable: Literal["yes", "opt_in", "no"] = "yes"


@dataclass(frozen=True, slots=True)
class Weights(Mapping[str, float]):
    """Values by name, with the version under which requests are routed. Immutable.

    Example
    -------
    >>> spec = (WeightSpec("w_rtt", 0.5, 0.05, 2.0, "per ms of RTT"),)
    >>> Weights.of(spec, {"w_rtt": 0.7}, version=3)["w_rtt"]
    0.7
    """

    values_by_name: Mapping[str, float] = field(default_factory=dict)
    version: int = 0

    @classmethod
    def of(
        cls,
        specs: tuple[WeightSpec, ...],
        values: Mapping[str, float] | None = None,
        *,
        version: int = 0,
        allow_out_of_range: bool = False,
    ) -> Weights:
        """Defaults of `specs` overridden by `values`.

        Raises `WeightsError` for a name the policy does not have, a value that is not finite, or one outside the box.
        With `allow_out_of_range` any finite value of 0 or more is accepted: the cost stays positive.
        """
        values = values or {}
        _check(specs, values, allow_out_of_range=allow_out_of_range)
        merged = {spec.name: float(values.get(spec.name, spec.default)) for spec in specs}
        return cls(merged, version)

    def changed(
        self, specs: tuple[WeightSpec, ...], values: Mapping[str, float], *, allow_out_of_range: bool = False
    ) -> Weights:
        """Return the next version with `values` replaced. Raises `WeightsError` as `of` does.

        Other values may be out of range: they were checked when they were set.
        """
        _check(specs, values, allow_out_of_range=allow_out_of_range)
        return Weights.of(specs, {**self, **values}, version=self.version + 1, allow_out_of_range=True)

    def out_of_range(self, specs: tuple[WeightSpec, ...]) -> tuple[str, ...]:
        """Names of the values that lie outside their box."""
        return tuple(spec.name for spec in specs if not spec.low <= self[spec.name] <= spec.high)

    def __getitem__(self, name: str) -> float:
        return self.values_by_name[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.values_by_name)

    def __len__(self) -> int:
        return len(self.values_by_name)


def _check(specs: tuple[WeightSpec, ...], values: Mapping[str, float], *, allow_out_of_range: bool) -> None:
    by_name = {spec.name: spec for spec in specs}
    for name, value in values.items():
        if name not in by_name:
            have = ", ".join(by_name) or "none"
            raise WeightsError(f"weight {name!r} is unknown to this policy{closest(name, by_name)}; it has: {have}")
        spec = by_name[name]
        if allow_out_of_range and not (isfinite(value) and value >= 0):
            raise WeightsError(f"weight {name!r} is {value!r}; expected a number of 0 or more")
        if not allow_out_of_range and not spec.low <= value <= spec.high:  # False for NaN too
            raise WeightsError(f"weight {name!r} is {value!r}; expected a number in [{spec.low:g}, {spec.high:g}]")
