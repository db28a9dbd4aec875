"""The tables of `gorgo simulate`: a block per load, policies as rows, and ratios to the first policy.

Owns text and tables; `compare` has the statistics.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from gorgo.apps.failures import failure_lines
from gorgo.apps.result_table import DEFAULT, results_table
from gorgo.apps.results import ResultRow, load_text
from gorgo.apps.simulate.compare import Figure, Ratio, e2e_s_p95, mean_row, ratio_of_rows, ttft_ms_p95
from gorgo.apps.simulate.job import BASELINES

_SEEDS = "mean [95 % interval] over {} seeds, paired"
_RATIOS: tuple[tuple[str, Figure], ...] = (("p95 TTFT", ttft_ms_p95), ("p95 E2E", e2e_s_p95))


def show_rows(
    rows: Sequence[ResultRow], policies: Sequence[str], console: Console, *, columns: Sequence[str] = DEFAULT
) -> None:
    """Every comparison in the rows, `policies` in their order, and of its table these `columns`."""
    for trace, time_scale in dict.fromkeys((row.trace, row.time_scale) for row in rows):
        block = [row for row in rows if (row.trace, row.time_scale) == (trace, time_scale)]
        groups = [[row for row in block if row.policy == policy] for policy in policies]
        groups = [group for group in groups if group]
        seeds = len({row.seed for row in block})
        console.print(f"{_title(block, seeds)}\n", style="bold", highlight=False)
        console.print(results_table([mean_row(group) for group in groups], baselines=BASELINES, columns=columns))
        if seeds > 1 and len(groups) > 1:
            console.print()
            console.print(_ratios(groups))
            divided = f"{groups[0][0].policy}'s figure / the row's, below 1 is better"
            console.print(f"{divided}: {_SEEDS.format(seeds)}", style="dim", soft_wrap=True)
        for line in _failures([mean_row(group) for group in groups]):
            console.print(line, style="yellow", highlight=False, soft_wrap=True, markup=False)
        console.print()
    console.print("Engines and network are simulated, in virtual time; the Router is the one that `gorgo serve` runs.")
    console.print("oracle: the rule of gorgo-ms with full knowledge of the engines; not the optimum, it can lose.")
    console.print("floor: each request alone on the nearest idle replica, all seen so far cached; a lower bound.")


def _failures(rows: Sequence[ResultRow]) -> Iterator[str]:
    """Yield why requests failed, policies that failed alike in one line."""
    policies: dict[str, list[str]] = {}
    for row in rows:
        for line in failure_lines(row.failures, row.n):
            policies.setdefault(line, []).append(row.policy or "-")
    for line, names in policies.items():
        yield f"failed, {', '.join(names)}: {line}"


def _title(block: Sequence[ResultRow], seeds: int) -> str:
    row = block[0]
    many = f", means of {seeds} seeds" if seeds > 1 else f", seed {row.seed}"
    return f"{row.trace} at {load_text(row.time_scale)}: {row.n} requests{many}"


def _ratios(groups: Sequence[Sequence[ResultRow]]) -> Table:
    first = groups[0]
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    table.add_column(f"{first[0].policy} / ...", no_wrap=True)
    for name, _ in _RATIOS:
        table.add_column(f"ratio of {name}", justify="right", no_wrap=True)
    for group in groups[1:]:
        table.add_row(group[0].policy or "-", *_cells(first, group))
    return table


def _cells(first: Sequence[ResultRow], group: Sequence[ResultRow]) -> Iterator[str]:
    for _, figure in _RATIOS:
        yield _words(ratio_of_rows(first, group, figure))


def _words(ratio: Ratio | None) -> str:
    if ratio is None:
        return "-"
    if ratio.low is None:
        return f"{ratio.value:.3f}"
    return f"{ratio.value:.3f} \\[{ratio.low:.3f}, {ratio.high:.3f}]"
