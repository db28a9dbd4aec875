"""The rows of the page on scaling: a day under each rule over three seeds, and a replica that joins cold or warmed.

`python -m tests.figures.scaling` writes the tables of the page, after `python -m tests.figures record scaling ...`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from gorgo.lab.simulate.compare import mean_interval, ratio_of
from tests.documents import DOCS
from tests.figures.marked import Cell, Table, View
from tests.figures.stored import read_stored
from tests.figures.written import write_table

SEEDS = 3
DAY_COMMANDS, JOIN_COMMANDS = (
    [f"python -m tests.bench.scaling {what} --seed {seed}" for seed in range(SEEDS)] for what in ("day", "join")
)
SIGNAL = "gorgo_replicas_wanted"
#: Rows of the page by those of the command.
RULES: Mapping[str, str] = {
    SIGNAL: f"`{SIGNAL}` for 95 %",
    "HPA, utilisation 0.9": "an HPA on utilisation, target 0.9",
    "HPA, utilisation 0.6": "an HPA on utilisation, target 0.6",
    "HPA, utilisation 0.95": "an HPA on utilisation, target 0.95",
    "HPA, queue 0.5": "an HPA on queue length, target 0.5",
    **{f"static {count}": f"nothing: {count} that stand" for count in (5, 6, 8)},
}


def scaling_day(results: Sequence[Any]) -> View:
    """Return a row per rule: means over the days with their intervals, and its cost over that of the signal."""
    by_rule = {name: [_row(day, rule=name) for day in results] for name in RULES}
    hours = {name: [row["replica_hours"] for row in rows] for name, rows in by_rule.items()}
    rows: dict[tuple[str, ...], dict[str, Cell]] = {}
    values = {"requests, mean": fmean(row["requests"] for row in by_rule[SIGNAL]), "objective, %": 95.0}
    for name, found in by_rule.items():
        in_time = mean_interval([100 * row["attained"] for row in found])
        ratio = ratio_of(list(zip(hours[SIGNAL], hours[name], strict=True)))
        assert ratio is not None, "every fleet costs something"
        rows[RULES[name],] = {
            "first token within 8 s": _with_interval(in_time, ".1f", " %"),
            "worst day": f"{100 * min(row['attained'] for row in found):.1f} %",
            "replicas, mean": f"{fmean(row['mean_replicas'] for row in found):.2f}",
            "replica hours": f"{fmean(hours[name]):.1f}",
            "the signal's hours over these": "" if name == SIGNAL else _with_interval(
                (ratio.value, ratio.low or ratio.value, ratio.high or ratio.value), ".2f"
            ),
            "p95 TTFT": _p95([row["ttft_ms_p95"] for row in found]),
        }  # fmt: skip
        values |= {f"{name}: hours over": ratio.value, f"{name}: in time": in_time[0]}
    return View(tables=[Table(labels=("the number of replicas follows",), rows=rows)], values=values)


def scaling_join(results: Sequence[Any]) -> View:
    """Return a row per load: what the replica that joins serves, cold and warmed, and TTFT of warmed over cold."""
    rows: dict[tuple[str, ...], dict[str, Cell]] = {}
    values: dict[str, float] = {"seeds": float(SEEDS)}
    for rate in dict.fromkeys(row["rate_per_s"] for row in results[0]):
        cold, warmed = ([_row(run, rate_per_s=rate, warm=warm) for run in results] for warm in (False, True))

        served = [100 * fmean(row["by_the_fifth"] / row["requests"] for row in some) for some in (cold, warmed)]
        cells: dict[str, Cell] = {
            "of the requests it serves": " % and ".join(f"{share:.0f}" for share in served) + " %"
        }
        for name, words in (("ttft_ms_mean", "mean TTFT"), ("ttft_ms_p95", "p95 TTFT")):
            means = [fmean(row[name] for row in some) for some in (cold, warmed)]
            each = [one[name] / other[name] for one, other in zip(warmed, cold, strict=True)]
            cells[f"{words}, cold and warmed"] = " and ".join(f"{value:,.0f}" for value in means) + " ms"
            cells[f"{words}, warmed over cold, by seed"] = ", ".join(f"{ratio:.2f}" for ratio in each)
            values |= {f"{rate:g} a second, {words}, {end}": of(each) for end, of in (("least", min), ("most", max))}
        rows[f"{rate:g}",] = cells
    return View(tables=[Table(labels=("requests per second",), rows=rows)], values=values)


def _row(rows: Sequence[Mapping[str, Any]], *, warm: bool | None = None, **labels: Any) -> Mapping[str, Any]:
    """Return the row with these labels."""
    (found,) = [
        row
        for row in rows
        if all(row[name] == value for name, value in labels.items())
        and (warm is None or (row["warm_prompts"] > 0) == warm)
    ]
    return found


def _with_interval(interval: Sequence[float], form: str, unit: str = "") -> str:
    """Return a mean and the ends of its interval in words; shares end at 100 %."""
    value, low, high = (min(each, 100.0) if unit else each for each in interval)
    return f"{value:{form}}{unit} ({low:{form}} to {high:{form}})"


def _p95(found: Sequence[float | None]) -> str:
    known = [each for each in found if each is not None]
    if len(known) < len(found):
        return "none: 5 % and more failed"
    return f"{fmean(known) / 1e3:.1f} s"


def main() -> None:
    page = DOCS / "scaling.md"
    for name, view in (("scaling", scaling_day), ("scaling-warmed", scaling_join)):
        (table,) = view(read_stored(name).results).tables
        write_table(page, name, table)


if __name__ == "__main__":
    main()
