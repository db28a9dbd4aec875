"""What can be said of a metric and its labels, for the tables of the proxy and of the tuner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Kind = Literal["counter", "gauge", "histogram"]


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """One row of the table."""

    name: str
    kind: Kind
    labels: tuple[str, ...]
    description: str


@dataclass(frozen=True, slots=True)
class LabelSpec:
    """One label, of all metrics that have it or of those named in `of`.

    `values` are all that there are, where the code knows them. `bound` says how many there can be; a number is that of
    `values`.
    """

    label: str
    of: tuple[str, ...]
    meaning: str
    values: tuple[str, ...] = ()
    bound: str = ""

    @property
    def at_most(self) -> str:
        return self.bound or str(len(self.values))


def label_of(name: str, label: str, labels: Sequence[LabelSpec]) -> LabelSpec:
    """What `labels` know of a label of a metric."""
    return next(spec for spec in labels if spec.label == label and (not spec.of or name in spec.of))
