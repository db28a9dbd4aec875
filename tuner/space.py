"""The box in which weights are searched, in log space: equal steps are equal factors.

Maps a policy's weights to the vector that an optimizer moves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import exp, log

from gorgo.core.policy.weights import WeightSpec
from gorgo.errors import WeightsError


@dataclass(frozen=True, slots=True)
class LogBox:
    """The logarithms of a policy's weights, one coordinate per weight in the order of `specs`.

    Parameters
    ----------
    specs:
        The weights to move. Each box must be positive: the logarithm of 0 is nowhere.

    Example
    -------
    >>> box = LogBox((WeightSpec("w_rtt", 0.5, 0.05, 2.0, "per ms of RTT"),))
    >>> (coordinate,) = box.to_log({"w_rtt": 0.5})
    >>> box.from_log([coordinate + 9])
    {'w_rtt': 2.0}

    References
    ----------
    GORGO, equation 4: x' = clip(exp(ln x + sigma * z), [low, high]).
    """

    specs: tuple[WeightSpec, ...]

    def __post_init__(self) -> None:
        for spec in self.specs:
            if not 0 < spec.low <= spec.default <= spec.high:
                box = f"[{spec.low:g}, {spec.high:g}] around {spec.default:g}"
                raise WeightsError(
                    f"weight {spec.name!r} has the box {box}; a log space needs 0 < low <= default <= high"
                )

    def __len__(self) -> int:
        return len(self.specs)

    @property
    def low(self) -> tuple[float, ...]:
        """Return the lower corner in log space."""
        return tuple(log(spec.low) for spec in self.specs)

    @property
    def high(self) -> tuple[float, ...]:
        """Return the upper corner in log space."""
        return tuple(log(spec.high) for spec in self.specs)

    @property
    def width(self) -> float:
        """Return the mean distance between two opposite sides in log space."""
        return sum(high - low for low, high in zip(self.low, self.high, strict=True)) / len(self)

    def start(self) -> tuple[float, ...]:
        """Return the defaults in log space."""
        return self.to_log({})

    def to_log(self, weights: Mapping[str, float]) -> tuple[float, ...]:
        """Return weights as a point; a missing one is at its default.

        Raises `WeightsError` for a value outside its box. Names outside the box are ignored.
        """
        return tuple(log(_inside(spec, weights.get(spec.name, spec.default))) for spec in self.specs)

    def from_log(self, point: Sequence[float]) -> dict[str, float]:
        """Return the weights at `point`, each clipped to its box."""
        assert len(point) == len(self.specs), "one coordinate per weight"
        return {spec.name: _clipped(spec, coordinate) for spec, coordinate in zip(self.specs, point, strict=True)}


#: Boxes of the GORGO paper, which `--mode paper` searches.
PUBLISHED_BOXES: Mapping[str, Mapping[str, tuple[float, float]]] = {
    "gorgo": {"w_rtt": (0.05, 2.0), "w_queue": (0.05, 0.5)}
}


def searched_box(
    policy: str, box: Mapping[str, tuple[float, float]] | None, *, published: bool
) -> Mapping[str, tuple[float, float]]:
    """Return the bounds that differ from the policy's own: those of `box`, and with `published` the paper's.

    >>> searched_box("gorgo", {"w_queue": (0.01, 1.0)}, published=True)
    {'w_rtt': (0.05, 2.0), 'w_queue': (0.01, 1.0)}
    """
    return {**(PUBLISHED_BOXES.get(policy, {}) if published else {}), **(box or {})}


def tuned_box(
    specs: Sequence[WeightSpec], *, tune_lambda: bool = False, box: Mapping[str, tuple[float, float]] | None = None
) -> LogBox:
    """Return the box of the weights that a tuner may move.

    Parameters
    ----------
    specs:
        All of the policy's weights; those of kind `never` stay.
    tune_lambda:
        Whether preferences (kind `asked`, as lambda) move too.
    box:
        Other bounds by name; the policy's default must lie within.

    Raises `WeightsError` if no weight is left to move, or `box` names another one.
    """
    moved = {spec.name: spec for spec in specs if spec.tunable == "yes" or (tune_lambda and spec.tunable == "opt_in")}
    if not moved:
        raise WeightsError("this policy has no weight that a tuner may move")
    for name, (low, high) in (box or {}).items():
        if name not in moved:
            raise WeightsError(f"box for {name!r}: not a weight that is moved; expected one of {', '.join(moved)}")
        moved[name] = replace(moved[name], low=low, high=high)
    return LogBox(tuple(moved.values()))


def _inside(spec: WeightSpec, value: float) -> float:
    if not spec.low <= value <= spec.high:  # False for NaN too
        raise WeightsError(f"weight {spec.name!r} is {value!r}; expected a number in [{spec.low:g}, {spec.high:g}]")
    return value


def _clipped(spec: WeightSpec, coordinate: float) -> float:
    # Compared in log space: far outside the box exp() would overflow.
    if coordinate >= log(spec.high):
        return spec.high
    if coordinate <= log(spec.low):
        return spec.low
    return min(max(exp(coordinate), spec.low), spec.high)  # exp(log(x)) can be one ulp outside
