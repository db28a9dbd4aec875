"""The paper's claims: ratios of two of its figures, and the same ratios simulated."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from gorgo.apps.demo.options import PAPER
from gorgo.apps.fleet_fit.named_runs import ON_HACKED, ON_WILDCHAT, RunName, load_name
from gorgo.apps.fleet_fit.published import (
    AFFINITY,
    FIGURE_NAMES,
    HACKED,
    HALF_LOAD,
    HALF_LOAD_TIME_SCALE,
    LOAD_SWEEP,
    P95,
    WILDCHAT,
    WINDOWS,
    RunStats,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimRow:
    """One comparison of the paper: a ratio of two of its figures, and the same ratio simulated."""

    on: str
    of: str
    against: str
    figure: str
    published: float
    simulated: float


def claims_of(found: Mapping[RunName, RunStats]) -> Iterator[ClaimRow]:
    """Yield the published comparisons: held-out windows, the load sweep, tables 5 to 7."""
    for window in WINDOWS:
        yield from _against(window.name, window.stats, [AFFINITY], found)
    for against in (AFFINITY, "least-request"):
        for time_scale, theirs in LOAD_SWEEP[against].items():
            name = load_name(time_scale)
            for number, place in enumerate(P95):
                yield _claim(name, against, place, LOAD_SWEEP[PAPER][time_scale][number] / theirs[number], found)
    half_load = load_name(HALF_LOAD_TIME_SCALE)
    for row in _against(half_load, HALF_LOAD, _others(HALF_LOAD), found):
        yield replace(row, on=f"{half_load}, table 5")
    yield from _against(ON_WILDCHAT, WILDCHAT, _others(WILDCHAT), found, range(len(FIGURE_NAMES)))
    yield from _against(ON_HACKED, HACKED, _others(HACKED), found)


def _others(stats: Mapping[str, RunStats]) -> list[str]:
    return [policy for policy in stats if policy != PAPER]


def _against(
    on: str,
    stats: Mapping[str, RunStats],
    others: Sequence[str],
    found: Mapping[RunName, RunStats],
    places: Sequence[int] = P95,
) -> Iterator[ClaimRow]:
    """Yield the paper's policy over each other one, as published and simulated."""
    for against in others:
        for place in places:
            yield _claim(on, against, place, stats[PAPER].values()[place] / stats[against].values()[place], found)


def _claim(on: str, against: str, place: int, published: float, found: Mapping[RunName, RunStats]) -> ClaimRow:
    return ClaimRow(
        on=on,
        of=PAPER,
        against=against,
        figure=FIGURE_NAMES[place],
        published=published,
        simulated=found[on, PAPER].values()[place] / found[on, against].values()[place],
    )
