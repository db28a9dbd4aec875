"""Lines of the sidecar on stdout and stderr, as words or as JSON objects."""

from __future__ import annotations

import json
from contextlib import suppress
from datetime import UTC, datetime

from rich.console import Console

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
