"""Restarts of an engine, detected by its counters: its cache is then empty.

Theory of operation. A restart between two probes leaves no other trace: probes succeed, broken connections are retried,
and the prefix index would be wrong for hours. Counters only grow while a process runs, so a counter that went back is
another process. A process that has served as much as its predecessor had at the last scrape is not detected; the index
had little of that one. A partition moves no counter, and the index stays.
"""

from __future__ import annotations

from gorgo.core.messages.request import EngineSample

#: Counters since the engine's start; an engine reports some of them.
_COUNTERS = ("prompt_tokens_total", "prefill_tokens_total")


class RestartDetector:
    """The counters of one engine as scraped last.

    Example
    -------
    >>> restarts = RestartDetector()
    >>> [restarts.observe(EngineSample(prompt_tokens_total=total)) for total in (900.0, 900.0, None, 20.0)]
    [False, False, False, True]
    >>> restarts.count
    1
    """

    __slots__ = ("_last", "count")

    def __init__(self) -> None:
        #: Since the replica joined the fleet.
        self.count = 0
        self._last: dict[str, float] = {}

    def observe(self, sample: EngineSample) -> bool:
        """Return whether the process is another one than at the last scrape."""
        reported = {name: value for name in _COUNTERS if (value := getattr(sample, name)) is not None}
        restarted = any(value < self._last.get(name, 0.0) for name, value in reported.items())
        self._last |= reported
        self.count += restarted
        return restarted
