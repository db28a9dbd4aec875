"""The table of verdicts, for a terminal and as Markdown.

Owns words and columns. Markdown is the table's home: what is printed and what stands in the README are the same cells.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from gorgo.apps.laboratory.command import Findings
from gorgo.apps.laboratory.target import Rows, Target, Verdict
from gorgo.apps.laboratory.targets import BASELINES, OURS
from gorgo.apps.simulate.compare import mean_row

HEADER = ("on", "of", "against", "figure", "target", "ratio [95 %]", "")
#: What each group of targets is about.
TITLES = {
    "baselines": "Against the best of the paper's four baselines",
    "published": "Against the published policy",
    "oracle": "Against the oracle with the same lambda and delta",
    "scenarios": "When something goes wrong or is different",
    "wildchat": "Short prompts, little reuse, no queues",
    "priors": "Told the wrong speed, 3x either way, against itself told the right one",
    "paper": "The published claim: 4 to 15 % below the best baseline on held-out windows",
}


def show_findings(findings: Findings, console: Console) -> None:
    """Everything: verdicts by group, the figures behind them, and what it took."""
    for title, verdicts in _grouped(findings.verdicts):
        console.print(f"{title}\n", style="bold", highlight=False)
        console.print(_table(HEADER, [(*cells(verdict), _word(verdict)) for verdict in verdicts]))
        console.print()
    console.print(_table(FIGURES_HEADER, figure_cells(findings.rows)))
    console.print()
    console.print(summary(findings), highlight=False, soft_wrap=True)


def as_markdown(findings: Findings) -> str:
    """The same as Markdown."""
    parts = [
        f"**{title}**\n\n{_markdown(HEADER, [(*cells(verdict), _word(verdict)) for verdict in verdicts])}"
        for title, verdicts in _grouped(findings.verdicts)
    ]
    parts += [_markdown(FIGURES_HEADER, figure_cells(findings.rows)), summary(findings)]
    return "\n\n".join(parts) + "\n"


def summary(findings: Findings) -> str:
    """Counts and times in a line."""
    met = sum(verdict.met for verdict in findings.verdicts)
    return (
        f"{met} of {len(findings.verdicts)} targets met, all simulated; {findings.runs} runs, {findings.cpu_s:.0f} s "
        f"of processor time; {findings.made} of them were made now, in {findings.wall_s:.0f} s. "
        "`~`: the interval holds the limit, so more seeds could turn the verdict."
    )


def cells(verdict: Verdict) -> tuple[str, ...]:
    """A row of the table but for its verdict."""
    target = verdict.target
    return (
        _where(target),
        target.policy,
        _against(verdict),
        target.figure,
        f"<= {target.at_most:.2f}",
        _ratio(verdict),
    )


FIGURES_HEADER = ("on", "policy", "TTFT p50 ms", "p95", "E2E p50 s", "p95", "hit %")


def figure_cells(rows: Rows) -> list[tuple[str, ...]]:
    """Means over seeds of every policy on every setting."""
    found = {}
    for (setting, policy), by_seed in rows.items():
        if by_seed:
            found[setting.label, policy] = mean_row(list(by_seed.values()))
    labels = list(dict.fromkeys(label for label, _ in found))
    ordered = sorted(found, key=lambda place: (labels.index(place[0]), place[1]))
    return [
        (
            label,
            policy,
            *(_figure(value, form) for value, form in (
                (found[label, policy].ttft_ms.p50, ".0f"),
                (found[label, policy].ttft_ms.p95, ".0f"),
                (found[label, policy].e2e_s.p50, ".2f"),
                (found[label, policy].e2e_s.p95, ".2f"),
                (_percent(found[label, policy].cache_hit), ".1f"),
            )),
        )
        for label, policy in ordered
    ]  # fmt: skip


def _grouped(verdicts: Sequence[Verdict]) -> Iterator[tuple[str, list[Verdict]]]:
    for group in dict.fromkeys(verdict.target.group for verdict in verdicts):
        yield TITLES.get(group, group), [verdict for verdict in verdicts if verdict.target.group == group]


def _where(target: Target) -> str:
    labels = [setting.label for setting in target.settings]
    return labels[0] if len(labels) == 1 else f"geometric mean of {len(labels)}"


def _against(verdict: Verdict) -> str:
    """Who the other was: the best of the four by name where there is one setting."""
    target = verdict.target
    if target.others == (OURS,):
        return "itself"
    if tuple(target.others) == BASELINES:
        return verdict.best[0] if len(verdict.best) == 1 else "the best"
    return ", ".join(target.others)


def _ratio(verdict: Verdict) -> str:
    ratio = verdict.ratio
    if ratio is None:
        return "-"
    if ratio.low is None or ratio.high is None:
        return f"{ratio.value:.3f}"
    return f"{ratio.value:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]"


def _word(verdict: Verdict) -> str:
    return ("pass" if verdict.met else "missed") + ("" if verdict.sure else " ~")


def _figure(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _percent(share: float | None) -> float | None:
    return None if share is None else 100 * share


def _table(header: Iterable[str], rows: Iterable[Sequence[str]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for name in header:
        table.add_column(name, no_wrap=True)
    for row in rows:
        table.add_row(*(cell.replace("[", "\\[") for cell in row))
    return table


def _markdown(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
