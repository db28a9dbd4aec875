"""The tables of pickers behind Envoy: medians over rounds, and ratios to the plain Envoy of the same round."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from tests.bench.behind_envoy.targets import PLAIN, SERVE
from tests.bench.relay.report import DIRECT, Measure, Runs, added_ttft_ms, aligned, cpu_us, number_text

#: Events that have come of those that the engine gives the load alone, and a p99 gap in multiples of the engine's own:
#: with these a number of streams is carried.
SHARE, GAPS = 0.97, 2.0
#: Below this share of what it should, the engine itself does not deliver: the machine is the limit.
ENGINE_SHARE = 0.95
#: Time of a request below which no picker was asked, us.
_ASKED_US = 10.0


def _picker_us(scenario: str, per: str) -> Callable[[Runs, str, int], float | None]:
    def value(runs: Runs, relay: str, number: int) -> float | None:
        run = runs.get((relay, scenario, number))
        if not run or not run[per] or relay in (DIRECT, PLAIN, SERVE):
            return None
        pickers_us: float = (run["cpu_s"] - run["first_cpu_s"]) / run[per] * 1e6
        return pickers_us

    return value


def _per_s(scenario: str) -> Callable[[Runs, str, int], float | None]:
    def value(runs: Runs, relay: str, number: int) -> float | None:
        run = runs.get((relay, scenario, number))
        return run["requests"] / run["wall_s"] if run and run["wall_s"] else None

    return value


MEASURES = (
    Measure("CPU per event, 64 endless streams", "us", cpu_us("events", "tokens")),
    Measure("CPU per event, 64 streams of 128", "us", cpu_us("streams", "tokens")),
    Measure("CPU per request, 500 B", "us", cpu_us("requests_small", "requests")),
    Measure("  of it the pickers", "us", _picker_us("requests_small", "requests")),
    Measure("CPU per request, 90 kB", "us", cpu_us("requests_large", "requests")),
    Measure("  of it the pickers, 90 kB", "us", _picker_us("requests_large", "requests")),
    Measure("CPU per stream of 8, 50 a second", "us", cpu_us("ttft_small", "requests")),
    Measure("requests/s on one core, 500 B", "", _per_s("requests_small")),
    Measure("added TTFT p50, 500 B", "ms", added_ttft_ms("ttft_small", 0.5)),
    Measure("added TTFT p99, 500 B", "ms", added_ttft_ms("ttft_small", 0.99)),
)


@dataclass(frozen=True, slots=True)
class Replayed:
    """Figures of `replay`: so many pickers, and calls a second (`None`: as many as there can be)."""

    pickers: int
    rate: float | None
    figures: Mapping[str, Any]


def figures(runs: Runs) -> list[dict[str, Any]]:
    """Return medians and ranges by relay, and medians of the ratios to the plain Envoy."""
    relays = _relays(runs)
    rows = []
    for measure in MEASURES:
        found = {relay: _by_round(runs, measure, relay) for relay in relays}
        row = {relay: _spread(of.values()) for relay, of in found.items() if of}
        ratios = {relay: _middle(_ratios(of, found.get(PLAIN, {}))) for relay, of in found.items() if relay != PLAIN}
        if row:
            rows.append({"name": measure.name, "unit": measure.unit, "relays": row, "ratios": ratios})
    return rows


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the rows of `figures`: relays across, then ratios."""
    relays = list(dict.fromkeys(relay for row in rows for relay in row["relays"]))
    compared = [relay for relay in relays if relay not in (DIRECT, PLAIN)]
    lines = [["", "", *relays, *(f"{relay} / {PLAIN}" for relay in compared)]]
    for row in rows:
        cells = [number_text(row["relays"].get(relay, {}).get("median")) for relay in relays]
        ratios = [row["ratios"].get(relay) for relay in compared]
        lines.append([row["name"], row["unit"], *cells, *("-" if one is None else f"{one:.2f}x" for one in ratios)])
    return aligned(lines)


def live_name(count: int) -> str:
    """Return the name of the job with so many live streams."""
    return f"{count} live streams"


def live_rows(runs: Runs, counts: Iterable[int], per_s: int) -> list[dict[str, Any]]:
    """Return per number of streams what comes of it: shares of the due events, p99 gaps, and who carries it."""
    rows = []
    for count in counts:
        name = live_name(count)
        for relay in _relays(runs):
            found = [number for of, job, number in runs if (of, job) == (relay, name)]
            judged = [_live(runs[relay, name, at], runs.get((DIRECT, name, at)), count * per_s) for at in found]
            if judged:
                rows.append({"streams": count, "relay": relay, **_judged(judged)})
    return rows


def _judged(rounds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    middles = {name: median(one[name] for one in rounds) for name in ("share", "gap_ms_p99", "times")}
    return {**middles, "carried": sum(one["carried"] for one in rounds), "rounds": len(rounds)}


def _live(run: Mapping[str, Any], direct: Mapping[str, Any] | None, due_per_s: int) -> dict[str, Any]:
    """Judge one run beside the engine's own of the same round."""
    share = run["tokens"] / (due_per_s * run["wall_s"]) if run["wall_s"] else 0.0
    gap_ms = run["gap_s"][1] * 1e3 if run["gap_s"] else float("inf")
    of = direct if direct is not None and direct["gap_s"] else None
    times = gap_ms / (of["gap_s"][1] * 1e3) if of else float("inf")
    own = of["tokens"] / (due_per_s * of["wall_s"]) if of else 0.0
    carried = own >= ENGINE_SHARE and share >= SHARE * own and times < GAPS
    return {"share": share, "gap_ms_p99": gap_ms, "times": times, "carried": carried}


def live_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the rows of `live_rows` as lines."""
    lines = [["streams", "", "events that came, %", "gap p99, ms", "of the engine's own", "carried in"]]
    for row in rows:
        cells = [f"{100 * row['share']:.1f}", f"{row['gap_ms_p99']:.0f}", f"{row['times']:.2f}x"]
        lines.append([f"{row['streams']:,}", row["relay"], *cells, f"{row['carried']} of {row['rounds']} rounds"])
    return aligned(lines)


def replayed_rows(found: Iterable[Replayed]) -> list[dict[str, Any]]:
    """Return per number of pickers: decisions a second as observed and of a whole core, and latencies."""
    rows = []
    for one in found:
        figures = one.figures
        rows.append(
            {
                "pickers": one.pickers,
                "offered": one.rate,
                "per_s": figures["decisions"] / figures["wall_s"],
                "cpu_us": figures["cpu_s"] / max(1, figures["decisions"]) * 1e6,
                "latency_ms": [at * 1e3 for at in figures["latency_s"]],
                "bad": figures["bad"],
            }
        )
    return rows


def replayed_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the rows of `replayed_rows` as lines."""
    lines = [["pickers", "offered/s", "decisions/s", "CPU, us", "of a whole core/s", "p50, ms", "p99, ms"]]
    for row in rows:
        offered = "all" if row["offered"] is None else f"{row['offered']:g}"
        p50, p99 = row["latency_ms"]
        of_core = f"{1e6 / row['cpu_us']:,.0f}" if row["cpu_us"] else "-"
        cells = [offered, f"{row['per_s']:,.0f}", f"{row['cpu_us']:.0f}", of_core, f"{p50:.2f}", f"{p99:.2f}"]
        lines.append([str(row["pickers"]), *cells])
    return aligned(lines)


def faults(runs: Runs) -> list[str]:
    """Return runs with wrong responses, and those in which no picker was asked."""
    wrong = [
        f"{relay}, {job}, round {number}: {run['bad']} bad of {run['bad'] + run['requests']} ({run['problem']})"
        for (relay, job, number), run in runs.items()
        if run["bad"]
    ]
    asked = _picker_us("requests_small", "requests")
    wrong += [
        f"{relay}, round {number}: no picker was asked"
        for relay, job, number in runs
        if job == "requests_small" and (us := asked(runs, relay, number)) is not None and us < _ASKED_US
    ]
    return wrong


def _relays(runs: Runs) -> list[str]:
    return sorted(dict.fromkeys(relay for relay, _, _ in runs), key=lambda relay: relay != DIRECT)


def _by_round(runs: Runs, measure: Measure, relay: str) -> dict[int, float]:
    rounds = sorted({number for _, _, number in runs})
    return {number: value for number in rounds if (value := measure.value(runs, relay, number)) is not None}


def _ratios(of: Mapping[int, float], base: Mapping[int, float]) -> list[float]:
    return [value / base[number] for number, value in of.items() if base.get(number, 0.0) > 0]


def _middle(values: Sequence[float]) -> float | None:
    return median(values) if values else None


def _spread(values: Iterable[float]) -> dict[str, float]:
    found = list(values)
    return {"median": median(found), "least": min(found), "most": max(found)}
