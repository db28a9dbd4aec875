"""Whether an engine has started again since it was last looked at: then its cache is empty.

Owns the comparison of one replica's counters. What is forgotten then, the Router decides.

Theory of operation. A restart that is over between two probes leaves no other trace: pings answer, connections that
broke are retried, and what was believed cached would be believed for hours. Counters only grow while a process lives,
so one that went back is another process. One that has served as much as its predecessor had at the last look is not
seen; of that one little was believed. A partition moves no counter, and what is cached behind it stays believed.
"""

from __future__ import annotations

from gorgo.core.messages.request import EngineSample

#: Counted by an engine from its start, whichever of them it tells.
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
        """Whether this is another process than the one of the last scrape."""
        counters = {name: value for name in _COUNTERS if (value := getattr(sample, name)) is not None}
        restarted = any(value < self._last.get(name, 0.0) for name, value in counters.items())
        self._last |= counters
        self.count += restarted
        return restarted
