"""From runs to the table: one figure per measure and relay, ratios against the others, and the budgets.

A figure is the median over rounds. Added TTFT is a relay's quantile minus the engine's own in the same round, and a
ratio is that of two figures of the same round, because what else the machine does lasts longer than a round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np

from tests.bench.relay import capacity

DIRECT = "direct"
_SUBJECT = "gorgo"
PEER = "sglang-router"

#: (relay, scenario, round) to the figures that the load printed.
Runs = Mapping[tuple[str, str, int], Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Measure:
    """A row of the table: `value(runs, relay, round)` is None where it was not measured."""

    name: str
    unit: str
    value: Callable[[Runs, str, int], float | None]


@dataclass(frozen=True, slots=True)
class Budget:
    """A bound on a measure of gorgo: absolute, or as a multiple of another relay's figure in the same run.

    The figure is at most the limit or, with `least`, at least.
    """

    measure: str
    limit: float
    times: str | None = None
    least: bool = False


def ttft_ms_of(scenario: str, quantile: float) -> Callable[[Runs, str, int], float | None]:
    """Return a measure: a quantile of the time to the first token."""

    def value(runs: Runs, relay: str, number: int) -> float | None:
        run = runs.get((relay, scenario, number))
        return float(np.quantile(run["ttft_s"], quantile)) * 1e3 if run and run["ttft_s"] else None

    return value


def added_ttft_ms(scenario: str, quantile: float) -> Callable[[Runs, str, int], float | None]:
    """Return a measure: the same without the engine's own of that round."""
    ttft_ms = ttft_ms_of(scenario, quantile)

    def value(runs: Runs, relay: str, number: int) -> float | None:
        own, engine = ttft_ms(runs, relay, number), ttft_ms(runs, DIRECT, number)
        return None if relay == DIRECT or own is None or engine is None else own - engine

    return value


def cpu_us(scenario: str, per: str, time: str = "cpu_s") -> Callable[[Runs, str, int], float | None]:
    """Return a measure: microseconds of a time per request or event."""

    def value(runs: Runs, relay: str, number: int) -> float | None:
        run = runs.get((relay, scenario, number))
        return run[time] / run[per] * 1e6 if run and run[per] and relay != DIRECT else None

    return value


def _memory(figure: Callable[[Mapping[str, Any]], float]) -> Callable[[Runs, str, int], float | None]:
    def value(runs: Runs, relay: str, number: int) -> float | None:
        run = runs.get((relay, "memory", number))
        return figure(run) / 1e6 if run and run["requests"] else None

    return value


def _grown_per_thousand(run: Mapping[str, Any]) -> float:
    grown: float = (run["resident_after"] - run["resident_before"]) * 1000 / run["requests"]
    return grown


def _streams(runs: Runs, relay: str, number: int) -> float | None:
    run = runs.get((relay, capacity.NAME, number))
    return float(run["streams"]) if run else None


MEASURES = (
    Measure("TTFT p50, 500 B", "ms", ttft_ms_of("ttft_small", 0.5)),
    Measure("TTFT p50, 90 kB", "ms", ttft_ms_of("ttft_large", 0.5)),
    Measure("added TTFT p50, 500 B", "ms", added_ttft_ms("ttft_small", 0.5)),
    Measure("added TTFT p99, 500 B", "ms", added_ttft_ms("ttft_small", 0.99)),
    Measure("added TTFT p50, 90 kB", "ms", added_ttft_ms("ttft_large", 0.5)),
    Measure("added TTFT p99, 90 kB", "ms", added_ttft_ms("ttft_large", 0.99)),
    Measure("CPU per request, 500 B", "us", cpu_us("requests_small", "requests")),
    Measure("CPU per request, 90 kB", "us", cpu_us("requests_large", "requests")),
    # Not the relay's doing: other work on its core. Where this is large, distrust TTFT.
    Measure("waiting for a core, stream of 8", "us", cpu_us("ttft_small", "requests", "waited_s")),
    Measure("CPU per event, 64 endless streams", "us", cpu_us("events", "tokens")),
    Measure("CPU per event, 64 streams of 128", "us", cpu_us("streams", "tokens")),
    Measure("streams at 100 events/s", "", _streams),
    Measure("RSS before load", "MB", _memory(lambda run: run["resident_before"])),
    Measure("memory of 1,000 open streams", "MB", _memory(_grown_per_thousand)),
)

BUDGETS = (
    Budget("CPU per event, 64 endless streams", 1.1, times=PEER),
    Budget("CPU per request, 500 B", 3.0, times=PEER),
    Budget("CPU per request, 90 kB", 1.5, times=PEER),
    Budget("streams at 100 events/s", 800, least=True),
    Budget("added TTFT p50, 500 B", 0.5),
    Budget("added TTFT p99, 500 B", 2.0),
    Budget("added TTFT p50, 90 kB", 0.7),
    Budget("added TTFT p99, 90 kB", 2.0),
    Budget("memory of 1,000 open streams", 40.0),
)


def table(runs: Runs) -> str:
    """Measures down, relays across, the range of gorgo's rounds, and gorgo as a multiple of each of the others."""
    relays = sorted(dict.fromkeys(relay for relay, _, _ in runs), key=lambda relay: relay != DIRECT)
    others = [relay for relay in relays if relay == PEER or relay.startswith(f"{_SUBJECT} ")]
    others = others if _SUBJECT in relays else []
    header = ["", "", *relays, f"{_SUBJECT} min..max", *(f"{_SUBJECT}/{other}" for other in others)]
    return aligned([header, *(_row(measure, runs, relays, others) for measure in MEASURES)])


def budgets(runs: Runs) -> str:
    """One line per budget: pass, missed, or why it could not be judged."""
    return aligned([_judged(budget, runs) for budget in BUDGETS])


def figures(runs: Runs) -> list[dict[str, Any]]:
    """Return the rows of the table as data: medians, ranges, and medians of the ratios to sglang-router."""
    relays = list(dict.fromkeys(relay for relay, _, _ in runs))
    return [
        {
            "name": measure.name,
            "unit": measure.unit,
            "relays": {
                relay: {"median": median(found), "least": min(found), "most": max(found)}
                for relay in relays
                if (found := list(_by_round(runs, measure, relay).values()))
            },
            "ratios": {
                relay: median(ratios)
                for relay in relays
                if relay != PEER and (ratios := _ratios(runs, measure, PEER, relay))
            },
        }
        for measure in MEASURES
    ]


def faults(runs: Runs) -> list[str]:
    """Runs with wrong or lost responses; a relay's figures mean little then."""
    return [
        f"{relay}, {scenario}, round {number}: {run['bad']} bad of {run['bad'] + run['requests']} ({run['problem']})"
        for (relay, scenario, number), run in runs.items()
        if run["bad"]
    ]


def _by_round(runs: Runs, measure: Measure, relay: str) -> dict[int, float]:
    rounds = sorted({number for _, _, number in runs})
    return {number: value for number in rounds if (value := measure.value(runs, relay, number)) is not None}


def _ratios(runs: Runs, measure: Measure, other: str, of: str = _SUBJECT) -> list[float]:
    own, base = _by_round(runs, measure, of), _by_round(runs, measure, other)
    return [own[number] / base[number] for number in own if base.get(number, 0.0) > 0]


def _row(measure: Measure, runs: Runs, relays: Sequence[str], others: Sequence[str]) -> list[str]:
    figures = [number_text(_middle(_by_round(runs, measure, relay).values())) for relay in relays]
    own = _by_round(runs, measure, _SUBJECT).values()
    spread = f"{number_text(min(own))}..{number_text(max(own))}" if len(own) > 1 else ""
    ratios = [_middle(_ratios(runs, measure, other)) for other in others]
    return [measure.name, measure.unit, *figures, spread, *("-" if one is None else f"{one:.2f}x" for one in ratios)]


def _judged(budget: Budget, runs: Runs) -> list[str]:
    measure = next(known for known in MEASURES if known.name == budget.measure)
    if budget.times is None:
        found, unit = _middle(_by_round(runs, measure, _SUBJECT).values()), f" {measure.unit}"
    else:
        found, unit = _middle(_ratios(runs, measure, budget.times)), f"x {budget.times}"
    limit = f"at {'least' if budget.least else 'most'} {budget.limit:g}{unit}"
    if found is None:
        return ["not judged", budget.measure, limit, "not measured"]
    missed = found < budget.limit if budget.least else found > budget.limit
    return ["MISSED" if missed else "pass", budget.measure, limit, f"{found:.2f}"]


def _middle(values: Iterable[float]) -> float | None:
    found = list(values)
    return median(found) if found else None


def number_text(value: float | None) -> str:
    """Return a figure with about three digits."""
    if value is None:
        return "-"
    return f"{value:.2f}" if abs(value) < 10 else f"{value:,.1f}" if abs(value) < 100 else f"{value:,.0f}"


def aligned(rows: Sequence[Sequence[str]]) -> str:
    """Return rows as lines of columns."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(
            cell.ljust(width) if place < 2 else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    )
    return "\n".join(line.rstrip() for line in lines)
