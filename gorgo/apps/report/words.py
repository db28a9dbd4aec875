"""The plain sentence under each plot, made from the figures that the plot shows, losses included.

Every function takes figures and returns words; none knows a policy's name beforehand, except that the paper's baselines
and the yardsticks are called so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from gorgo.apps.report.runs import Cell, Comparison, ReportGeneration
from gorgo.apps.report.statistics import Measure, best_baseline, mean, means, ratio
from gorgo.apps.simulate.compare import Ratio

#: Loads named one by one in a sentence; more are counted.
MAX_NAMED = 6


def listed(words: Iterable[str]) -> str:
    """As in `a, b and c`."""
    *head, last = list(words)
    return f"{', '.join(head)} and {last}" if head else last


def counted(count: int, noun: str) -> str:
    """As in `1 load`, `4 loads`."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def percent_apart(value: float, base: float) -> str:
    """How far `value` is from `base`, as in `4.2 % lower`."""
    if value == base:
        return "the same"
    change = abs(value / base - 1) * 100
    size = "less than 0.1" if change < 0.05 else f"{change:.1f}" if change < 10 else f"{change:,.0f}"
    return f"{size} % {'lower' if value < base else 'higher'}"


def at(time_scale: float) -> str:
    return f"at time_scale {time_scale:g}"


def best_of(measure: Measure, loads: Mapping[float, Mapping[str, float]]) -> str:
    """Who is best at how many loads, and where somebody else is. `loads`: time_scale to label to figure."""
    known = {time_scale: values for time_scale, values in loads.items() if values}
    if not known:
        return f"No {measure.name} is known."
    if len(known) == 1:
        ((time_scale, values),) = known.items()
        return _best_of_one(measure, time_scale, values)
    best = _best(measure)
    winners = {time_scale: _winners(values, measure) for time_scale, values in known.items()}
    labels = dict.fromkeys(label for values in known.values() for label in values)
    wins = {label: sum(label in found for found in winners.values()) for label in labels}
    subject = max(wins, key=wins.__getitem__)
    text = f"{subject} has the {best} {measure.name} at {wins[subject]} of {counted(len(known), 'load')}"
    won = [known[time_scale] for time_scale in known if winners[time_scale] == [subject]]
    text += _margins(subject, won, measure)
    lost = [time_scale for time_scale in known if subject not in winners[time_scale]]
    return f"{text}{_losses(subject, lost, known, winners)}."


def _margins(subject: str, won: Sequence[Mapping[str, float]], measure: Measure) -> str:
    """How far the next best is away where somebody wins alone."""
    assert measure.best is not None
    best = measure.best
    gaps = []
    for values in won:
        others = [value for label, value in values.items() if label != subject]
        if others and best(others):
            gaps.append(abs(values[subject] / best(others) - 1) * 100)
    if not gaps:
        return ""
    low, high = f"{min(gaps):.1f}", f"{max(gaps):.1f}"
    return (
        f" ({low if low == high else f'{low} to {high}'} % {'above' if measure.best is max else 'below'} the next best)"
    )


def _best(measure: Measure) -> str:
    return "highest" if measure.best is max else "lowest"


def _winners(values: Mapping[str, float], measure: Measure) -> list[str]:
    assert measure.best is not None
    best = measure.best(list(values.values()))
    return [label for label, value in values.items() if value == best]


def _losses(
    subject: str,
    lost: Sequence[float],
    loads: Mapping[float, Mapping[str, float]],
    winners: Mapping[float, Sequence[str]],
) -> str:
    parts = []
    for time_scale in lost[:MAX_NAMED]:
        other, values = winners[time_scale][0], loads[time_scale]
        apart = f"is {percent_apart(values[other], values[subject])}" if values.get(subject) else "is the best there is"
        parts.append(f"{at(time_scale)} {other} {apart}")
    if len(lost) > MAX_NAMED:
        parts.append(f"another is better at {len(lost) - MAX_NAMED} more")
    return f"; {listed(parts)}" if parts else ""


def _best_of_one(measure: Measure, time_scale: float, values: Mapping[str, float]) -> str:
    ranked = sorted(values, key=values.__getitem__, reverse=measure.best is max)
    winners = _winners(values, measure)
    first, last = ranked[0], ranked[-1]
    told = measure.words(values[first])
    if len(values) == 1:
        return f"The {measure.name} of {first} is {told} {at(time_scale)}."
    if len(winners) > 1:
        return f"{listed(winners)} share the {_best(measure)} {measure.name} {at(time_scale)}, {told}."
    text = f"{first} has the {_best(measure)} {measure.name} {at(time_scale)}, {told}"
    second = f"{ranked[1]} follows with {measure.words(values[ranked[1]])}{_apart(values, ranked[1], first)}"
    end = f", {last} is last with {measure.words(values[last])}" if len(ranked) > 2 else ""
    return f"{text}; {second}{end}."


def _apart(values: Mapping[str, float], label: str, base: str) -> str:
    return f" ({percent_apart(values[label], values[base])})" if values[base] else ""


def loads_of(comparison: Comparison, measure: Measure) -> dict[float, dict[str, float]]:
    """Means over seeds by load and label, without the yardsticks."""
    return {time_scale: means(comparison.contenders(time_scale), measure) for time_scale in comparison.loads}


def evidence(comparison: Comparison, measure: Measure, policies: Sequence[str]) -> list[str]:
    """What is shown of these policies against the best baseline, and what is not."""
    sentences = []
    for policy in policies:
        found = [
            ratio(cell, base, measure)
            for time_scale, cells in comparison.loads.items()
            for cell in cells
            if cell.policy == policy and (base := best_baseline(comparison.contenders(time_scale), measure)) is not None
        ]
        shown = [one for one in found if one is not None and one.low is not None]
        if shown:
            sentences.append(_verdict(policy, measure, shown))
    return sentences


def _verdict(policy: str, measure: Measure, ratios: Sequence[Ratio]) -> str:
    lower = sum(one.high is not None and one.high < 1 for one in ratios)
    higher = sum(one.low is not None and one.low > 1 for one in ratios)
    open_ = len(ratios) - lower - higher
    pairs = sorted({one.n for one in ratios})
    seeds = f"{pairs[0]}" if len(pairs) == 1 else f"{pairs[0]} to {pairs[-1]}"
    return (
        f"{policy} against the best of the paper's baselines in {measure.name}: shown lower at {lower} of "
        f"{counted(len(ratios), 'load')}, shown higher at {higher}, not decided at {open_} "
        f"(95 % intervals over {seeds} seeds)."
    )


def spread_of_load(comparison: Comparison) -> str:
    """Who leans most on one replica, who least."""
    leaning = [
        (max(share.values()), time_scale, cell.label, max(share, key=share.__getitem__))
        for time_scale, cells in comparison.loads.items()
        for cell in cells
        if (share := mean_share(cell))
    ]
    if not leaning:
        return "No request was answered, so there is no share."
    part, time_scale, label, replica = max(leaning)
    text = f"{label} leans most on one replica: {part:.0%} of its requests go to {replica} {at(time_scale)}"
    least, where, even, _ = min(leaning)
    if len(leaning) > 1 and least < part:
        return f"{text}; {even} is the most even, with {least:.0%} at most {at(where)}."
    return f"{text}." if len(leaning) == 1 else f"{text}; no other is more even."


def mean_share(cell: Cell) -> dict[str, float]:
    """Share per replica, mean over runs; by name."""
    names = sorted({name for run in cell.runs for name in run.row.share})
    known = [run.row.share for run in cell.runs if run.row.share]
    return {name: sum(share.get(name, 0.0) for share in known) / len(known) for name in names} if known else {}


def belief(comparison: Comparison, real: Measure, believed: Measure) -> str:
    """How far belief and reports are apart where they are most."""
    apart = [
        (abs(b - r), cell.label, time_scale, r, b)
        for time_scale, cells in comparison.loads.items()
        for cell in cells
        if (r := mean(cell, real)) is not None and (b := mean(cell, believed)) is not None
    ]
    if not apart:
        return "What the routers believed is not known."
    _, label, time_scale, r, b = max(apart)
    return (
        f"Belief and the engines' reports are furthest apart under {label} {at(time_scale)}: "
        f"{b:.1f} % believed, {r:.1f} % real."
    )


def errors(comparison: Comparison) -> str:
    """How many failed, and under whom most."""
    sent = sum(run.row.n for cell in comparison.cells for run in cell.runs)
    failed: dict[str, int] = {}
    for cell in comparison.cells:
        failed[cell.label] = failed.get(cell.label, 0) + sum(run.row.errors for run in cell.runs)
    total = sum(failed.values())
    if not total:
        return f"None of {counted(sent, 'request')} failed."
    most = max(failed, key=failed.__getitem__)
    return f"{total:,} of {counted(sent, 'request')} failed; most of them under {most} ({failed[most]:,})."


def tuning(generations: Sequence[ReportGeneration]) -> str:
    """How far a campaign came."""
    if not generations:
        return "The history has no generation."
    accepted = sum(one.accepted for one in generations)
    text = f"{accepted} of {counted(len(generations), 'generation')} accepted"
    return f"{text}{_incumbent(generations)}{_sigma(generations)}."


def _incumbent(generations: Sequence[ReportGeneration]) -> str:
    known = [one.incumbent_objective_ms for one in generations if one.incumbent_objective_ms is not None]
    if len(known) < 2 or not known[0]:
        return ""
    apart = percent_apart(known[-1], known[0])
    return f"; the incumbent's objective went from {known[0]:,.0f} ms to {known[-1]:,.0f} ms ({apart})"


def _sigma(generations: Sequence[ReportGeneration]) -> str:
    known = [one.sigma for one in generations if one.sigma is not None]
    return f"; sigma from {known[0]:.3g} to {known[-1]:.3g}" if len(known) > 1 else ""
