"""One target: a policy against others on some settings, and whether it is met.

Owns the record and the arithmetic from rows to a verdict; the list of targets is `targets`. A ratio is that of
`apps.simulate.compare`: geometric mean over seeds with common random numbers, with its 95 % interval. Several settings
in one target are a geometric mean over them within each seed, so that the interval still counts seeds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import exp, log

from gorgo.apps.laboratory.setting import Setting
from gorgo.apps.results import ResultRow
from gorgo.apps.simulate.compare import (
    Figure,
    Ratio,
    best_of_rows,
    e2e_s_p50,
    e2e_s_p95,
    ratio_of,
    ttft_ms_p50,
    ttft_ms_p95,
)

#: Rows of one policy on one setting, by seed.
Rows = Mapping[tuple[Setting, str], Mapping[int, ResultRow]]

#: What targets speak of, by the word that stands in the table.
FIGURES: Mapping[str, Figure] = {
    "p50 TTFT": ttft_ms_p50,
    "p95 TTFT": ttft_ms_p95,
    "p50 E2E": e2e_s_p50,
    "p95 E2E": e2e_s_p95,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """`figure` of `policy` is at most `at_most` times that of the best of `others`.

    Parameters
    ----------
    group:
        What `--only` names.
    settings:
        One, or several of which the geometric mean is meant.
    others:
        The best is the one with the least mean of the figure over seeds, on each setting anew.
    others_on:
        Where the others run, setting by setting; None: on the same.
    figure:
        A key of `FIGURES`.
    """

    group: str
    policy: str
    settings: Sequence[Setting]
    others: Sequence[str]
    others_on: Sequence[Setting] | None = None
    figure: str
    at_most: float

    def runs(self) -> Iterator[tuple[Setting, str]]:
        """Every pair of setting and policy that it needs, for each seed."""
        for setting, beside in self.pairs:
            yield setting, self.policy
            yield from ((beside, other) for other in self.others)

    @property
    def pairs(self) -> Sequence[tuple[Setting, Setting]]:
        return list(zip(self.settings, self.others_on or self.settings, strict=True))


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came out. `best` names the other that was compared with on each setting; `ratio` is None without rows."""

    target: Target
    ratio: Ratio | None
    best: Sequence[str] = ()

    @property
    def met(self) -> bool:
        """Whether the mean is; the interval says how sure that is."""
        return self.ratio is not None and self.ratio.value <= self.target.at_most

    @property
    def sure(self) -> bool:
        """Whether the whole interval is on the mean's side of the limit."""
        if self.ratio is None or self.ratio.low is None or self.ratio.high is None:
            return False
        return self.ratio.high <= self.target.at_most or self.ratio.low > self.target.at_most


def judge(target: Target, rows: Rows) -> Verdict:
    """The target's verdict by the seeds that all of its runs have.

    Example
    -------
    >>> judge(Target(group="x", policy="a", settings=(), others=("b",), figure="p95 TTFT", at_most=1.0), {}).met
    False
    """
    figure = FIGURES[target.figure]
    by_seed: dict[int, list[tuple[float, float]]] = {}
    best: list[str] = []
    for setting, beside in target.pairs:
        groups = {other: list(rows.get((beside, other), {}).values()) for other in target.others}
        name = best_of_rows(groups, figure)
        if name is None:
            return Verdict(target, None)
        best.append(name)
        for seed, pair in _pairs(rows.get((setting, target.policy), {}), rows[beside, name], figure):
            by_seed.setdefault(seed, []).append(pair)
    whole = [_geometric(pairs) for pairs in by_seed.values() if len(pairs) == len(target.settings)]
    return Verdict(target, ratio_of(whole), tuple(best))


def _pairs(
    ours: Mapping[int, ResultRow], theirs: Mapping[int, ResultRow], figure: Figure
) -> Iterator[tuple[int, tuple[float, float]]]:
    for seed, row in ours.items():
        one, other = figure(row), figure(theirs[seed]) if seed in theirs else None
        if one and other:  # a zero has no logarithm, and no run takes no time
            yield seed, (one, other)


def _geometric(pairs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    ones, others = zip(*pairs, strict=True)
    return _mean(ones), _mean(others)


def _mean(values: Sequence[float]) -> float:
    return exp(sum(map(log, values)) / len(values))
