"""Progress of a running campaign as text: a status line, and a line per event, as words or as JSON objects.

Owns the form of the lines and where they are printed. Leaves to `tuner.sidecar.loop` what they say. On a terminal
the status line is updated in place; elsewhere it is printed once a minute.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime

from rich.console import Console
from rich.status import Status
from rich.text import Text

from tuner.campaign.generation import Generation

#: Between two lines in a log: a day of them is 1,440.
LINE_EVERY_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """The state of a campaign for its status line.

    Parameters
    ----------
    phase, generation:
        The campaign's.
    arm:
        Arm in force; empty without a comparison.
    weights:
        In force; None while unknown.
    incumbent:
        Best accepted weights.
    ttft_ms_p95:
        Of the newest window of samples under the weights in force; None without any.
    samples, needed:
        Of that window; `needed` is 0 where time decides.
    detail:
        Further words of the trial.
    trouble:
        Why the campaign pauses; None if it does not.
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
    """Prints lines and the status line.

    Parameters
    ----------
    say, complain:
        Called with news; with errors.
    terminal:
        For a status line in place; None without one.
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
    """Return one line: `comparing, generation 3 (offspring): w_rtt=0.61, p95 TTFT 412 ms, 40 of 128 samples`."""
    words = progress.phase if progress.trouble is None else f"{progress.phase} ({progress.trouble})"
    if progress.phase == "comparing":
        words += f", generation {progress.generation} ({progress.arm})"
    parts = [f"{words}: {shown(progress.weights or progress.incumbent)}"]
    if progress.ttft_ms_p95 is not None:
        parts.append(f"p95 TTFT {progress.ttft_ms_p95:.0f} ms")
    parts.append(_samples(progress.samples, progress.needed))
    return ", ".join([*parts, progress.detail] if progress.detail else parts)


def _samples(samples: int, needed: int) -> str:
    """Return a count that may pass what is needed: a phase can also wait for time.

    >>> _samples(4, 16), _samples(45, 16), _samples(45, 0)
    ('4 of 16 samples', '45 samples (16 needed)', '45 samples')
    """
    if not needed:
        return f"{samples} samples"
    return f"{samples} of {needed} samples" if samples <= needed else f"{samples} samples ({needed} needed)"


def verdict(generation: Generation) -> str:
    """Return a finished generation as one line."""
    took = "accepted" if generation.accepted else "rejected"
    measured = "" if generation.objective_ms is None else f", p95 TTFT {generation.objective_ms:.0f} ms"
    if generation.number and generation.objective_ms is not None and generation.incumbent_objective_ms is not None:
        measured += f" against {generation.incumbent_objective_ms:.0f} ms"
    return f"generation {generation.number} {took}: {shown(generation.weights)}{measured}: {generation.reason}"


def shown(weights: Mapping[str, float]) -> str:
    """Return weights as words."""
    return " ".join(f"{name}={value:.4g}" for name, value in weights.items())


# Lines of the sidecar on stdout and stderr, as words or as JSON objects.


_LEVELS = ("debug", "info", "warning", "error")


class LinePrinter:
    """Prints news on stdout and troubles on stderr.

    Parameters
    ----------
    form:
        `text`, or `json`: an object per line with `time`, `level`, `event` (`tuner`) and `text`.
    level:
        Least level printed: news are `info`, troubles `warning`.
    """

    def __init__(self, form: str = "text", level: str = "info") -> None:
        self._json, self._least = form == "json", _LEVELS.index(level)
        self._out = Console(soft_wrap=True, highlight=False)
        self._err = Console(stderr=True, soft_wrap=True, highlight=False)

    @property
    def terminal(self) -> Console | None:
        """Return the console of a status line; None without a terminal, or where lines are for programs."""
        shown = self._out.is_terminal and not self._json and self._least <= _LEVELS.index("info")
        return self._out if shown else None

    def say(self, line: str) -> None:
        """Print news."""
        self._print(self._out, "info", line, line)

    def complain(self, line: str) -> None:
        """Print a trouble."""
        self._print(self._err, "warning", line, f"gorgo: {line}")

    def _print(self, console: Console, level: str, line: str, words: str) -> None:
        """Print a line; a log that cannot grow loses lines, and the campaign goes on."""
        if _LEVELS.index(level) < self._least:
            return
        if self._json:
            at = datetime.now(UTC).isoformat(timespec="milliseconds")
            words = json.dumps({"time": at, "level": level, "event": "tuner", "text": line})
        with suppress(OSError):
            console.print(words, markup=False)
