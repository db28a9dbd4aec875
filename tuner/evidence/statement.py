"""A row of the evidence, the experiment that it is from, and the arithmetic of both.

Owns the records. A statement is a figure with its interval, the bound that it has to keep, and whether it does. Every
comparison pairs runs of the same windows and the same network.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import exp, log
from typing import Any

from gorgo.apps.simulate.compare import Ratio, ratio_of
from tuner.evidence.kept import AnyTask
from tuner.evidence.task import Found, Part

#: The window that is tuned on, by shape; both policies that learn.
TUNING = "art-chat-apr5"
OURS, PAPER = "gorgo-ms", "gorgo"
#: 672 samples: a window of 128, then 17 hops of 32.
PROTOCOL: dict[str, Any] = {"mode": "paper", "max_generations": 17}
SWITCHBACK: dict[str, Any] = {"mode": "switchback"}
#: A search of the twin, as small as finds anything: candidates, runs of each, runs of each finalist.
SEARCH: dict[str, Any] = {"candidates": 12, "seeds": 2, "held_out_seeds": 6}

Runs = Mapping[AnyTask, Found]


@dataclass(frozen=True, slots=True, kw_only=True)
class Statement:
    """One row of the table.

    Parameters
    ----------
    group:
        Of which experiment.
    text:
        What is stated.
    value:
        The figure; None where no run gave it.
    low, high:
        Its 95 % interval, where there is one.
    at_most, at_least:
        The bound that it has to keep; with neither the row is there to compare with.
    note:
        What else the runs showed.
    """

    group: str
    text: str
    value: float | None
    low: float | None = None
    high: float | None = None
    at_most: float | None = None
    at_least: float | None = None
    note: str = ""

    @property
    def met(self) -> bool | None:
        """None for a row without a bound."""
        if self.at_most is None and self.at_least is None:
            return None
        if self.value is None:
            return False
        return (self.at_most is None or self.value <= self.at_most) and (
            self.at_least is None or self.value >= self.at_least
        )


@dataclass(frozen=True, slots=True)
class Experiment:
    """Tasks first, then what follows of them: a second lot may depend on what the first has found."""

    name: str
    first: Callable[[Sequence[int]], Sequence[AnyTask]]
    judge: Callable[[Sequence[int], Runs], list[Statement]]
    then: Callable[[Sequence[int], Runs], Sequence[AnyTask]] | None = None


def campaign(options: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Options as a task has them."""
    return tuple(sorted(options.items()))


def half(seeds: Sequence[int]) -> Sequence[int]:
    """Long runs: half of the seeds, two at least."""
    return seeds[: max(2, len(seeds) // 2)]


def fifth(seeds: Sequence[int]) -> Sequence[int]:
    """A search is some forty runs: a fifth of the seeds."""
    return seeds[: max(1, len(seeds) // 5)]


def twice(seeds: Sequence[int]) -> list[int]:
    """20 seeds where others have 10."""
    return [*seeds, *(seed + 500 for seed in seeds)]


def ttft(part: Part) -> float:
    return part.ttft_ms_p95


def e2e(part: Part) -> float:
    return part.e2e_s_p95


def part_ratio(pairs: Sequence[tuple[Part, Part]], figure: Callable[[Part], float]) -> Ratio | None:
    return ratio_of([(figure(one), figure(other)) for one, other in pairs])


def geometric(values: Sequence[float]) -> float:
    return exp(sum(map(log, values)) / len(values))


def stated(
    group: str,
    text: str,
    ratio: Ratio | None,
    *,
    value: float | None = None,
    at_most: float | None = None,
    note: str = "",
) -> Statement:
    if ratio is None:
        return Statement(group=group, text=text, value=None, at_most=at_most, note=note)
    shown = ratio.value if value is None else value
    return Statement(group=group, text=text, value=shown, low=ratio.low, high=ratio.high, at_most=at_most, note=note)
