"""Runs of the same seeds side by side: means over seeds, and ratios with their uncertainty.

Owns the arithmetic, as plain functions of rows. A ratio is the geometric mean over seeds; with common random numbers
the two runs of a seed are much alike, so its interval (Student's, on the logarithms) is far narrower than those of the
two means.

Where rows are of disjoint windows of runs, these are the units: seeds of one window share its requests where the trace
is a file, so a window's ratio is the mean over its seeds, and the interval is over windows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import exp, log, sqrt

from gorgo.lab.results import ResultRow, Spread

#: Value of a row; None if it has none.
Figure = Callable[[ResultRow], float | None]

#: Student's t at 97.5 % for 1, 2, ... degrees of freedom; beyond 30 the last, which is a little too wide.
_T_975 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228,
    2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101, 2.093, 2.086,
    2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip


def ttft_ms_p95(row: ResultRow) -> float | None:
    return row.ttft_ms.p95


def e2e_s_p95(row: ResultRow) -> float | None:
    return row.e2e_s.p95


@dataclass(frozen=True, slots=True)
class Ratio:
    """A geometric mean of `n` ratios and its 95 % interval; None with a single pair."""

    value: float
    low: float | None
    high: float | None
    n: int


def geometric_mean(values: Sequence[float]) -> float:
    return exp(sum(map(log, values)) / len(values))


def ratio_of(pairs: Sequence[tuple[float, float]]) -> Ratio | None:
    """The first of each pair over the second; None without a pair of positive numbers.

    Example
    -------
    >>> ratio = ratio_of([(90.0, 100.0), (88.0, 100.0), (92.0, 100.0)])
    >>> round(ratio.value, 3), round(ratio.low, 3), round(ratio.high, 3), ratio.n
    (0.9, 0.852, 0.951, 3)
    """
    logs = [log(one / other) for one, other in pairs if one > 0 and other > 0]
    if not logs:
        return None
    n = len(logs)
    mean = sum(logs) / n
    if n == 1:
        return Ratio(exp(mean), None, None, 1)
    reach = _reach([value - mean for value in logs])
    return Ratio(exp(mean), exp(mean - reach), exp(mean + reach), n)


def mean_interval(values: Sequence[float]) -> tuple[float, ...]:
    """Return the mean with the ends of its 95 % interval; of one value alone only the value.

    Example
    -------
    >>> [round(value, 3) for value in mean_interval([1.0, 2.0, 3.0])]
    [2.0, -0.484, 4.484]
    """
    n = len(values)
    mean = sum(values) / n
    if n == 1:
        return (mean,)
    reach = _reach([value - mean for value in values])
    return mean, mean - reach, mean + reach


def _reach(deviations: Sequence[float]) -> float:
    """Half the width of the 95 % interval of a mean."""
    n = len(deviations)
    error = sqrt(sum(one**2 for one in deviations) / (n - 1) / n)
    return _T_975[min(n - 1, len(_T_975)) - 1] * error


def ratio_of_rows(rows: Iterable[ResultRow], others: Iterable[ResultRow], figure: Figure) -> Ratio | None:
    """`rows` against `others`, paired by trace, time scale, seed, setting and window; others are left out."""
    by_pair = {_pair_key(row): figure(row) for row in rows}
    return ratio_of_units((other.window, by_pair.get(_pair_key(other)), figure(other)) for other in others)


def ratio_of_units(pairs: Iterable[tuple[int | None, float | None, float | None]]) -> Ratio | None:
    """Return the ratio of pairs, each with its window: the pairs of a window are one unit, and one without is alone.

    >>> ratio = ratio_of_units([(0, 9.0, 10.0), (0, 8.0, 10.0), (1, 7.0, 10.0)])
    >>> round(ratio.value, 3), ratio.n
    (0.771, 2)
    """
    units: dict[int, list[float]] = {}
    for number, (window, one, value) in enumerate(pairs):
        if one is not None and value is not None and one > 0 and value > 0:
            units.setdefault(-1 - number if window is None else window, []).append(one / value)
    return ratio_of([(geometric_mean(ratios), 1.0) for ratios in units.values()])


def units_of(rows: Iterable[ResultRow]) -> int:
    """Return over how many units an interval of such rows is: windows where they have them, else seeds."""
    rows = tuple(rows)
    windows = {row.window for row in rows if row.window is not None}
    return len(windows) or len({row.seed for row in rows})


def best_of_rows(groups: Mapping[str, Sequence[ResultRow]], figure: Figure) -> str | None:
    """Return the name of the group with the least mean of `figure`; None if no group has it."""
    means = {name: mean_of_known([figure(row) for row in rows]) for name, rows in groups.items()}
    means_known = {name: value for name, value in means.items() if value is not None}
    return min(means_known, key=means_known.__getitem__, default=None)


def mean_row(rows: Sequence[ResultRow]) -> ResultRow:
    """One row for several seeds: the mean of each seed's figure; counts are sums, the seed is the first one's."""
    first = rows[0]
    names = sorted({name for row in rows for name in row.share})
    return replace(
        first,
        n=sum(row.n for row in rows),
        errors=sum(row.errors for row in rows),
        ttft_ms=_mean_spread([row.ttft_ms for row in rows]),
        e2e_s=_mean_spread([row.e2e_s for row in rows]),
        itl_ms=_mean_spread([row.itl_ms for row in rows]),
        cache_hit=mean_of_known([row.cache_hit for row in rows]),
        cache_hit_estimated=mean_of_known([row.cache_hit_estimated for row in rows]),
        share={name: sum(row.share.get(name, 0.0) for row in rows) / len(rows) for name in names},
        prediction_error_ms=_mean_spread([row.prediction_error_ms for row in rows]),
        slip_ms_p95=mean_of_known([row.slip_ms_p95 for row in rows]),
        failures={cause: sum(row.failures.get(cause, 0) for row in rows) for cause in _causes(rows)},
        tpot_ms=_mean_spread([row.tpot_ms for row in rows]),
        e2e_per_token_ms=_mean_spread([row.e2e_per_token_ms for row in rows]),
        tokens_per_s=mean_of_known([row.tokens_per_s for row in rows]),
        goodput=mean_of_known([row.goodput for row in rows]),
        prediction_error_ratio=mean_of_known([row.prediction_error_ratio for row in rows]),
        preemptions=None if first.preemptions is None else sum(row.preemptions or 0 for row in rows),
        digest=None,  # no run's
        planned=None if first.planned is None else sum(row.planned or row.n for row in rows),
    )


def _causes(rows: Sequence[ResultRow]) -> list[str]:
    return list(dict.fromkeys(cause for row in rows for cause in row.failures))


def _pair_key(row: ResultRow) -> tuple[str, float, int, str | None, int | None]:
    return row.trace, row.time_scale, row.seed, row.setting, row.window


def mean_of_known(values: Iterable[float | None]) -> float | None:
    """Return the mean of the known values; `None` if none is known."""
    values_known = [value for value in values if value is not None]
    return sum(values_known) / len(values_known) if values_known else None


def _mean_spread(spreads: Sequence[Spread]) -> Spread:
    return Spread(
        **{one.name: mean_of_known([getattr(spread, one.name) for spread in spreads]) for one in fields(Spread)}
    )
