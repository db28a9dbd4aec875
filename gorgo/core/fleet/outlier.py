"""Outlier detection for one replica: when it is ejected, for how long, and what readmits it.

Owns the state machine; the fleet filters candidates by it and applies the panic threshold over all of them.

Theory of operation::

    HEALTHY --3 failures in a row--> EJECTED --back-off over--> HALF_OPEN --probe or attempt succeeds--> HEALTHY
                                        ^                           |
                                        '---- any failure, back-off doubled

One that was ejected for failed probes is half open as soon as a probe succeeds.

Failures of attempts and of probes are counted apart: a server whose engine is broken still answers a ping, and that
answer must not wipe out the failed attempts. For the same reason a good probe readmits a replica, but only a good
attempt resets the count of ejections; until then one failure ejects again, for twice as long.

Evidence has an age: an attempt dispatched before the last ejection or readmission says nothing about the replica as it
is now. Without that rule, a hundred streams cut together would raise the back-off to its maximum at once.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum

from gorgo.core.backoff import backoff_s
from gorgo.core.limits import OutlierLimits

#: Back-off in a panic, s. After a wrong ejection the replica is back before the few others are overloaded; after a
#: right one the retries of four such replicas are within their budget.
PANIC_BACK_OFF_S = 2.0


#: Open answers that break off within this time are one event, s: the resets of one loss come closer together.
TOGETHER_S = 0.1
#: Causes of an ejection that are facts about the path.
_UNREACHABLE = ("probes", "region")


class HealthState(Enum):
    HEALTHY = "healthy"
    EJECTED = "ejected"
    HALF_OPEN = "half_open"


#: As names: in Python 3.11 a member of an Enum takes eight times as long to read.
_HEALTHY, _EJECTED, _HALF_OPEN = HealthState


class OutlierDetector:
    """The state of one replica.

    Each method returns whether the replica's eligibility may have changed; `on_change` is called just before.

    Example
    -------
    >>> health = OutlierDetector(OutlierLimits(failures=1))
    >>> health.attempt_failed(dispatched_s=0.0, now=1.0), health.state.value, health.backoff_until_s
    (True, 'ejected', 6.0)
    """

    __slots__ = (
        "attempt_failures",
        "backoff_until_s",
        "broken_answers",
        "broken_s",
        "changed_s",
        "ejected_by",
        "ejected_since_s",
        "ejections",
        "limits",
        "on_change",
        "probation",
        "probe_failures",
        "state",
    )

    def __init__(self, limits: OutlierLimits) -> None:
        #: May be replaced; the next ejection goes by the new ones.
        self.limits = limits
        self.on_change: Callable[[], None] | None = None
        self.state = _HEALTHY
        self.attempt_failures = 0
        self.probe_failures = 0
        #: Answers in a row that broke off after content, and when the last one was counted.
        self.broken_answers = 0
        self.broken_s = float("-inf")
        #: Ejections since the last good attempt: the exponent of the back-off.
        self.ejections = 0
        #: Cause of the last ejection: failed `attempts`, `refusals` of what others answer, broken or short
        #: `answers`, a `busy` engine, failed `probes`, or its unreachable `region`.
        self.ejected_by: str | None = None
        #: First ejection since it was healthy, `None` while healthy.
        self.ejected_since_s: float | None = None
        #: Last ejection or readmission.
        self.changed_s = float("-inf")
        #: End of the back-off, `None` unless ejected.
        self.backoff_until_s: float | None = None
        #: The trial attempt of a half-open replica; one at a time.
        self.probation: str | None = None

    @property
    def can_accept(self) -> bool:
        """Return whether a new attempt may be dispatched there, panic aside."""
        return self.state is _HEALTHY or (self.state is _HALF_OPEN and self.probation is None)

    @property
    def probe_down(self) -> bool:
        """Return whether probes ejected it, its own or its region's: a fact, where failed attempts are a guess."""
        return self.state is not _HEALTHY and self.ejected_by in _UNREACHABLE

    def attempt_started(self, attempt_id: str) -> bool:
        if self.state is not _HALF_OPEN or self.probation is not None:
            return False
        self.probation = attempt_id
        return self._changed()

    def attempt_ended(self, attempt_id: str) -> bool:
        """End the trial, whatever its result."""
        if self.probation != attempt_id:
            return False
        self.probation = None
        return self._changed()

    @property
    def breaks_answers(self) -> bool:
        """Return whether answers broke off twice, or ejected it, without a whole one since."""
        return self.broken_answers > 1 or (self.ejections > 0 and self.ejected_by == "answers")

    def attempt_succeeded(self, *, dispatched_s: float, now: float, whole: bool = True) -> bool:
        """Record an answer: `whole`, or its first token, which says nothing of a replica that breaks answers off."""
        if dispatched_s < self.changed_s:
            return False
        if whole:
            self.broken_answers = 0
        elif self.breaks_answers:
            return False
        self.attempt_failures = self.probe_failures = self.ejections = 0
        return self.state is not _HEALTHY and self._readmit(now)

    def attempt_failed(self, *, dispatched_s: float, now: float, by: str = "attempts") -> bool:
        if dispatched_s < self.changed_s or self.state is _EJECTED:
            return False
        self.attempt_failures += 1
        return self.attempt_failures >= self._tolerated and self._eject(by, now)

    def answer_broken(self, *, dispatched_s: float, now: float) -> bool:
        """Record an answer that broke off after content. Several that were open at once are one event."""
        together = dispatched_s < self.broken_s and now - self.broken_s < TOGETHER_S
        if dispatched_s < self.changed_s or self.state is _EJECTED or together:
            return False
        self.broken_answers += 1
        self.broken_s = now
        return self.broken_answers >= self._tolerated and self._eject("answers", now)

    def attempt_busy(self, last: bool, *, dispatched_s: float, now: float) -> bool:
        """Eject an engine that was busy once too often: `last`, or again after it was ejected for that."""
        if dispatched_s < self.changed_s or self.state is _EJECTED:
            return False
        again = self.ejections > 0 and self.ejected_by == "busy"
        return (last or again) and self._eject("busy", now)

    def probe_succeeded(self, *, now: float) -> bool:
        self.probe_failures = 0
        if self.state is _EJECTED and self.probe_down:
            # The cause of the ejection is over, however long the back-off has grown.
            return self.region_reachable(now=now)
        return self.state is _HALF_OPEN and self._readmit(now)

    def probe_failed(self, *, now: float) -> bool:
        if self.state is _EJECTED:
            return False
        self.probe_failures += 1
        return self.probe_failures >= self._tolerated and self._eject("probes", now)

    def region_unreachable(self, *, now: float) -> bool:
        """Eject the replica with its region, without further failures of its own."""
        return self.state is not _EJECTED and self._eject("region", now)

    def region_reachable(self, *, now: float) -> bool:
        """End the back-off: a replica of the region answers again."""
        return self.state is _EJECTED and self.end_backoff(now=max(now, self.backoff_until_s or now))

    def end_backoff(self, *, now: float) -> bool:
        """Become half open if the back-off is over."""
        if self.backoff_until_s is None or now < self.backoff_until_s:
            return False
        self.state, self.backoff_until_s = _HALF_OPEN, None
        return self._changed()

    def shorten_backoff(self) -> None:
        """Shorten the back-off in a panic: failed attempts may be the fault of load."""
        if self.backoff_until_s is not None and not self.probe_down:
            self.backoff_until_s = min(self.backoff_until_s, self.changed_s + PANIC_BACK_OFF_S)

    @property
    def _tolerated(self) -> int:
        return 1 if self.ejections else self.limits.failures

    def _eject(self, by: str, now: float) -> bool:
        self.ejections += 1
        self.attempt_failures = self.probe_failures = self.broken_answers = 0
        self.state, self.changed_s, self.ejected_by = _EJECTED, now, by
        self.ejected_since_s = now if self.ejected_since_s is None else self.ejected_since_s
        self.backoff_until_s = now + backoff_s(self.ejections, first_s=self.limits.base_s, longest_s=self.limits.max_s)
        return self._changed()

    def _readmit(self, now: float) -> bool:
        self.state, self.changed_s, self.backoff_until_s = _HEALTHY, now, None
        self.ejected_since_s = None
        self.attempt_failures = self.probe_failures = 0
        return self._changed()

    def _changed(self) -> bool:
        if self.on_change is not None:
            self.on_change()
        return True
