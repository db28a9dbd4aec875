"""One put of weights at all proxies of a group or at none: which calls, and what undoes them. Without input and output.

Theory of operation: every call expects the version that its proxy reported last, so no change of another client is
overwritten. If one proxy does not take the weights, those that did get their earlier weights again. A call without an
answer may have been executed: that proxy is read, and undone too if it has the weights of this put.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tuner.sidecar.group.agreement import Agreement, Reported


@dataclass(frozen=True, slots=True)
class PutCall:
    """One call for one proxy."""

    values: Mapping[str, float]
    expected_version: int


class GroupPut:
    """One put. Every proxy's answer is passed to `applied`, `refused` or `unanswered` once.

    Parameters
    ----------
    agreement:
        Of the group; every proxy has reported a version.
    values:
        To put.
    """

    def __init__(self, agreement: Agreement, values: Mapping[str, float]) -> None:
        self.versions: dict[str, int] = {}
        self.unknown: set[str] = set()
        self._agreement, self._values = agreement, dict(values)
        self._before: dict[str, Reported] = {}
        for name in agreement.names:
            found = agreement.reported(name)
            assert found is not None, "proxies are read before a put"
            self._before[name] = found

    def calls(self) -> dict[str, PutCall]:
        """Return the calls of the put, for all proxies at a time."""
        return {name: PutCall(self._values, found.version) for name, found in self._before.items()}

    @property
    def complete(self) -> bool:
        """Whether all proxies took the weights."""
        return len(self.versions) == len(self._before)

    @property
    def disturbed(self) -> bool:
        """Whether a proxy may have had the weights."""
        return bool(self.versions or self.unknown)

    def applied(self, name: str, version: int) -> None:
        """Record a proxy that took the weights."""
        self.versions[name] = version
        self.unknown.discard(name)
        self._agreement.changed(name, Reported(version, self._values))

    def refused(self, name: str) -> None:
        """Record a proxy that changed nothing."""
        self.unknown.discard(name)

    def unanswered(self, name: str) -> None:
        """Record a call that may have been executed or not."""
        self.unknown.add(name)
        self._agreement.changed(name, None)

    def found(self, name: str, found: Reported) -> None:
        """Record what a proxy without an answer reports later."""
        if found.version != self._before[name].version and found.values == self._values:
            self.applied(name, found.version)
        else:
            self.refused(name)
            self._agreement.changed(name, found)

    def undo(self) -> dict[str, PutCall]:
        """Return the calls that give back their earlier weights to the proxies that took the new ones."""
        return {name: PutCall(self._before[name].values, version) for name, version in self.versions.items()}

    def undone(self, name: str, version: int) -> None:
        """Record a proxy that has its earlier weights again."""
        del self.versions[name]
        self._agreement.changed(name, Reported(version, self._before[name].values))

    def finish_put(self) -> None:
        """Record a put that all proxies took."""
        self._agreement.agreed(self._values, self.versions)
