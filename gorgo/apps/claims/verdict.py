"""A claim's verdict: a figure with its interval, the bound on it, and whether the bound is met."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from gorgo.apps.simulate.compare import Ratio


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimVerdict:
    """One row of a table of claims.

    Parameters
    ----------
    group:
        Claims of one group are shown together; `--only` names it.
    labels:
        First cells of the row: the claim.
    value, low, high:
        The figure and its 95 % interval; None where no run gave one.
    at_most, at_least:
        Bounds; a row without one is shown for comparison.
    note:
        Further figures of the runs.
    """

    group: str
    labels: tuple[str, ...]
    value: float | None = None
    low: float | None = None
    high: float | None = None
    at_most: float | None = None
    at_least: float | None = None
    note: str = ""

    @classmethod
    def of_ratio(cls, group: str, labels: tuple[str, ...], ratio: Ratio | None, **more: Any) -> ClaimVerdict:
        """Return the verdict on a ratio; `value=` shows another figure with the ratio's interval."""
        if ratio is None:
            return cls(group=group, labels=labels, **more | {"value": None})
        return cls(group=group, labels=labels, low=ratio.low, high=ratio.high, **{"value": ratio.value} | more)

    @property
    def met(self) -> bool | None:
        """Whether the figure is within its bounds; None without a bound. The interval does not count."""
        if self.at_most is None and self.at_least is None:
            return None
        return self.value is not None and self._within(self.value)

    @property
    def sure(self) -> bool:
        """Whether the whole interval is on the figure's side of the bound."""
        if self.low is None or self.high is None:
            return False
        return self._within(self.low) == self._within(self.high) == bool(self.met)

    def as_json(self) -> dict[str, Any]:
        row = asdict(self)
        return {"group": row.pop("group"), "text": ", ".join(row.pop("labels")), **row, "met": self.met}

    def _within(self, value: float) -> bool:
        return (self.at_most is None or value <= self.at_most) and (self.at_least is None or value >= self.at_least)
