"""The end of the demo: table, notes and next steps."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from gorgo.apps.demo.fleet import PROBE_INTERVAL_S, REPLICAS, ROUND_TRIP_MS
from gorgo.apps.result_table import results_table
from gorgo.apps.results import ResultRow, load_text

#: Where the table would be cut otherwise: no terminal, no width.
MIN_WIDTH = 80


def show_demo(rows: Sequence[ResultRow], console: Console, *, out: Path | None = None) -> None:
    """Print the table, notes on it, and next steps."""
    if not console.is_terminal:
        console = Console(file=console.file, width=max(MIN_WIDTH, console.width))
    console.print(results_table(rows))
    console.print()
    for line in _notes(rows) if rows else []:
        console.print(line, highlight=False)
    console.print("\nWhere to look next", style="bold")
    for line in _next_steps(out):
        console.print(f"  {line}", highlight=False, markup=False, soft_wrap=True)


def _notes(rows: Sequence[ResultRow]) -> list[str]:
    trips = ", ".join(f"{name} {ROUND_TRIP_MS[region]} ms" for name, region in REPLICAS.items())
    requests = f"{rows[0].n} requests of {rows[0].trace} at {load_text(rows[0].time_scale)}"
    return [
        f"{requests}, each policy on a fresh fleet.",
        f"The proxy is real; engines and round trips are [bold]simulated[/bold] ({trips}).",
        f"Probes and scrapes every {PROBE_INTERVAL_S:g} s. One short run: small differences are noise.",
    ]


def _next_steps(out: Path | None) -> list[str]:
    files = (
        [
            f"{out}: results.json, and per policy requests.jsonl, regions.yaml and logs",
            f"{f'gorgo report {out}':<51}tables and plots as one page",
        ]
        if out is not None
        else []
    )
    return [
        *files,
        "gorgo demo --policy gorgo --policy power-of-two    other policies; gorgo policies lists them",
        "gorgo demo --trace TRACE.jsonl.gz --load 0.5       your own trace, at half its load",
        "gorgo demo --tune                                  the tuner at work beside the proxy",
        "gorgo demo --out DIR                               keeps every request's record",
        "gorgo serve --config regions.yaml                  the proxy in front of your replicas (README.md)",
    ]
