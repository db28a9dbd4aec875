"""A target: a policy's figure against that of others on some workloads, and its verdict.

The list of targets is in `targets`. A ratio is that of `apps.simulate.compare`: the geometric mean over seeds with
common random numbers, with its 95 % interval. Several workloads of one target are a geometric mean over them within
each seed, so that the interval still counts seeds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from gorgo.apps.claims.verdict import ClaimVerdict
from gorgo.apps.claims.workload import PolicyTask, Workload
from gorgo.apps.results import ResultRow
from gorgo.apps.simulate.compare import (
    Figure,
    best_of_rows,
    geometric_mean,
    ratio_of,
)

#: Rows of one policy on one workload, by seed.
Rows = Mapping[tuple[Workload, str], Mapping[int, ResultRow]]

_PARTS = ("mean", "p50", "p95", "p99")
_SPREADS = {"TTFT": "ttft_ms", "E2E": "e2e_s", "ITL": "itl_ms", "TPOT": "tpot_ms", "E2E/token": "e2e_per_token_ms"}


def _part(field: str, part: str) -> Figure:
    return lambda row: getattr(getattr(row, field), part)


#: Figures by their name in the table: those of which less is better.
MEASURES: Mapping[str, Figure] = {
    **{f"{part} {name}": _part(field, part) for name, field in _SPREADS.items() for part in _PARTS},
    "MAPE": lambda row: row.prediction_error_ratio,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RatioTarget:
    """`figure` of `policy` is at most `at_most` times that of the best of `others`.

    Parameters
    ----------
    group:
        As in `ClaimVerdict`.
    workloads:
        One, or several for their geometric mean.
    others:
        The best has the lowest mean of the figure over seeds; chosen per workload.
    others_on:
        Workloads of the others, one per workload; None: the same.
    figure:
        A key of `MEASURES`.
    """

    group: str
    policy: str
    workloads: Sequence[Workload]
    others: Sequence[str]
    others_on: Sequence[Workload] | None = None
    figure: str
    at_most: float

    def tasks(self, seeds: Sequence[int]) -> Iterator[PolicyTask]:
        """Yield every run that the target needs."""
        for workload, beside in self.pairs:
            for on, policy in ((workload, self.policy), *((beside, other) for other in self.others)):
                yield from (PolicyTask(on, policy, seed) for seed in seeds[: on.seeds])

    @property
    def pairs(self) -> Sequence[tuple[Workload, Workload]]:
        return list(zip(self.workloads, self.others_on or self.workloads, strict=True))

    def labels(self, best: Sequence[str]) -> tuple[str, str, str, str]:
        """Return the first cells of the row; `best` has the best of the others on each workload."""
        names = [workload.label for workload in self.workloads]
        on = names[0] if len(names) == 1 else f"geometric mean of {len(names)}"
        return on, self.policy, self._against(best), self.figure

    def _against(self, best: Sequence[str]) -> str:
        if self.others == (self.policy,):
            return "itself"
        if len(self.others) == 1:
            return self.others[0]
        return best[0] if len(best) == 1 else "the best"


def judge(target: RatioTarget, rows: Rows) -> ClaimVerdict:
    """Return the target's verdict, from the seeds that all of its runs have.

    Example
    -------
    >>> judge(RatioTarget(group="x", policy="a", workloads=(), others=("b",), figure="p95 TTFT", at_most=1.0), {}).met
    False
    """
    figure = MEASURES[target.figure]
    by_seed: dict[int, list[tuple[float, float]]] = {}
    best: list[str] = []
    for workload, beside in target.pairs:
        groups = {other: list(rows.get((beside, other), {}).values()) for other in target.others}
        name = best_of_rows(groups, figure)
        if name is None:
            return _verdict(target, [], ())
        best.append(name)
        for seed, pair in _pairs(rows.get((workload, target.policy), {}), rows[beside, name], figure):
            by_seed.setdefault(seed, []).append(pair)
    whole = [_geometric(pairs) for pairs in by_seed.values() if len(pairs) == len(target.workloads)]
    return _verdict(target, whole, best)


def _verdict(target: RatioTarget, pairs: Sequence[tuple[float, float]], best: Sequence[str]) -> ClaimVerdict:
    return ClaimVerdict.of_ratio(target.group, target.labels(best), ratio_of(pairs), at_most=target.at_most)


def _pairs(
    ours: Mapping[int, ResultRow], theirs: Mapping[int, ResultRow], figure: Figure
) -> Iterator[tuple[int, tuple[float, float]]]:
    for seed, row in ours.items():
        one, other = figure(row), figure(theirs[seed]) if seed in theirs else None
        if one and other:  # a zero has no logarithm, and no run takes no time
            yield seed, (one, other)


def _geometric(pairs: Sequence[tuple[float, float]]) -> tuple[float, float]:
    ours, others = zip(*pairs, strict=True)
    return geometric_mean(ours), geometric_mean(others)
