"""The tuner's first filter: a candidate that a log of decisions refutes touches no traffic."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

from gorgo.core.policy.interface import Policy
from gorgo.lab.decisions import LoggedDecision, read_decisions
from gorgo.lab.whatif.judge import Chances, JudgedLog, check_replayable
from gorgo.policies.registry import make_policy

#: Newest decisions that are judged: more take seconds per candidate, in which the tuner does nothing else.
MOST_DECISIONS = 20_000


class LogFilter:
    """Says of a candidate why a log refutes it.

    Parameters
    ----------
    decisions:
        Of the log, oldest first.
    policy:
        The tuned one.

    Raises `ConfigError` for a policy that cannot choose again from a log, and `TraceError` for a log that says nothing.
    """

    def __init__(self, decisions: Iterable[LoggedDecision], policy: Policy) -> None:
        check_replayable(policy)
        self._log, self._policy = JudgedLog(decisions), policy
        #: Of the newest incumbent, with which candidate after candidate is compared.
        self._incumbent: tuple[dict[str, float], Chances] | None = None

    @classmethod
    def of(cls, path: Path, policy: str) -> LogFilter:
        """Return the filter of a log's newest decisions; raises `TraceError` for a wrong one, too."""
        return cls(read_decisions(path, most=MOST_DECISIONS).decisions, make_policy(policy))

    def __call__(self, offspring: Mapping[str, float], incumbent: Mapping[str, float]) -> str | None:
        """Return why the log refutes the offspring against the incumbent; `None` if it does not."""
        before = dict(incumbent)
        if self._incumbent is None or self._incumbent[0] != before:
            self._incumbent = before, self._log.chances(self._policy, before)
        return self._log.judge(self._policy, offspring, reference=self._incumbent[1]).unpromising
