"""What a person sees of a campaign that runs: a line about where it is, and a line for each thing that happens.

Owns the words. On a terminal the line stands still and changes; elsewhere it is printed now and then, for a log.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from rich.console import Console
from rich.status import Status
from rich.text import Text

from tuner.campaign.generation import Generation

#: Between two lines in a log: a day of them is 1,440.
LINE_EVERY_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Where a campaign is.

    Parameters
    ----------
    phase, generation:
        The campaign's.
    arm:
        Which of two weight sets is in force; empty where there are no two.
    weights:
        In force; None while the proxy has not said.
    incumbent:
        What the campaign holds for best.
    ttft_ms_p95:
        Of the newest window of samples that were routed by the weights in force; None without any.
    samples, needed:
        How many there are of it, and how many are looked for; 0 where time decides.
    detail:
        More words of the trial.
    trouble:
        Why it stands still; None if it does not.
    """

    phase: str
    generation: int
    arm: str
    weights: Mapping[str, float] | None
    incumbent: Mapping[str, float]
    ttft_ms_p95: float | None
    samples: int
    needed: int
    detail: str = ""
    trouble: str | None = None


class Reporter:
    """Tells a person.

    Parameters
    ----------
    say, complain:
        Where lines go that are news, and those that are errors.
    terminal:
        Where the line can stand still; None without one.
    """

    def __init__(
        self, say: Callable[[str], None], complain: Callable[[str], None], terminal: Console | None = None
    ) -> None:
        self.say, self.complain = say, complain
        self._status: Status | None = None if terminal is None else terminal.status("")
        if self._status is not None:
            self._status.start()
        self._said_s = float("-inf")

    def show(self, progress: Progress, *, now: float) -> None:
        if self._status is not None:
            self._status.update(Text(line(progress)))
        elif now >= self._said_s + LINE_EVERY_S:
            self._said_s = now
            self.say(line(progress))

    def close(self) -> None:
        if self._status is not None:
            self._status.stop()


def line(progress: Progress) -> str:
    """One line: `comparing, generation 3 (offspring): w_rtt=0.61, p95 TTFT 412 ms, 40 of 128 samples`."""
    words = progress.phase if progress.trouble is None else f"{progress.phase} ({progress.trouble})"
    if progress.phase == "comparing":
        words += f", generation {progress.generation} ({progress.arm})"
    parts = [f"{words}: {shown(progress.weights or progress.incumbent)}"]
    if progress.ttft_ms_p95 is not None:
        parts.append(f"p95 TTFT {progress.ttft_ms_p95:.0f} ms")
    of = f" of {progress.needed}" if progress.needed else ""
    parts.append(f"{progress.samples}{of} samples")
    return ", ".join([*parts, progress.detail] if progress.detail else parts)


def verdict(row: Generation) -> str:
    """A finished generation in one line."""
    took = "accepted" if row.accepted else "rejected"
    measured = "" if row.objective_ms is None else f", p95 TTFT {row.objective_ms:.0f} ms"
    if row.number and row.objective_ms is not None and row.incumbent_objective_ms is not None:
        measured += f" against {row.incumbent_objective_ms:.0f} ms"
    return f"generation {row.number} {took}: {shown(row.weights)}{measured}: {row.reason}"


def shown(weights: Mapping[str, float]) -> str:
    """Weights as words."""
    return " ".join(f"{name}={value:.4g}" for name, value in weights.items())
