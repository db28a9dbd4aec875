"""The tuner's first filter: a candidate that a log of decisions refutes touches no traffic."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from gorgo.core.policy.interface import Policy
from gorgo.errors import TraceError
from gorgo.lab.decisions import LoggedDecision, newest_decisions
from gorgo.lab.whatif.judge import LEAST_DECISIONS, Chances, JudgedLog, check_replayable
from gorgo.policies.registry import make_policy

#: Newest decisions that are judged: more take seconds per candidate, in which the tuner does nothing else.
MOST_DECISIONS = 20_000


class LogFilter:
    """Says of a candidate why a log refutes it.

    A candidate is judged by the decisions that its incumbent made: how late requests are under other weights is known
    of few decisions. The log is read again for each incumbent, and while it has too few decisions of one.

    Parameters
    ----------
    read:
        Returns the newest decisions of the log, oldest first.
    policy:
        The tuned one.

    Raises `ConfigError` for a policy that cannot choose again from a log. A log that cannot be read any longer, or
    whose chances are not known, refutes nothing: a campaign does without.
    """

    def __init__(self, read: Callable[[], Iterable[LoggedDecision]], policy: Policy) -> None:
        check_replayable(policy)
        self._read, self._policy = read, policy
        self._incumbent: dict[str, float] | None = None
        #: The incumbent's decisions, and its own chances in them.
        self._log: tuple[JudgedLog, Chances] | None = None

    @classmethod
    def of(cls, path: Path, policy: str) -> LogFilter:
        """Return the filter of a log, which is read once; raises `TraceError` for a wrong one, too."""
        newest_decisions(path, most=1)
        return cls(lambda: newest_decisions(path, most=MOST_DECISIONS), make_policy(policy))

    def __call__(self, offspring: Mapping[str, float], incumbent: Mapping[str, float]) -> str | None:
        """Return why the log refutes the offspring against the incumbent; `None` if it does not."""
        before = dict(incumbent)
        if self._log is None or self._incumbent != before:
            self._incumbent, self._log = before, self._logged(before)
        if self._log is None:
            return None
        log, own = self._log
        return log.judge(self._policy, offspring, reference=own).unpromising

    def _logged(self, incumbent: Mapping[str, float]) -> tuple[JudgedLog, Chances] | None:
        """Return the decisions of an incumbent; `None` for too few."""
        name = self._policy.name
        try:
            made = [one for one in self._read() if one.policy == name and dict(one.weights) == incumbent]
            if len(made) < LEAST_DECISIONS:
                return None
            log = JudgedLog(made)
        except TraceError:
            return None
        return log, log.chances(self._policy, incumbent)
