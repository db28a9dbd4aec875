"""The queue of commands for the proxy, and the owner of the weights in force. Without input and output.

Theory of operation: a put carries the version that the tuner knows, so a change by another client is never overwritten.
A command without an answer may have been executed; every change has the name of its process (`by`), so that the tuner
recognises its own. A newer command for weights replaces an older one in the queue.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Literal

from tuner.campaign.generation import Freeze, PutWeights, RollBack, Stop
from tuner.proxy_client import ProxyWeights

Command = PutWeights | RollBack | Freeze | Stop
Owner = Literal["known", "ours", "proxy's", "foreign"]

#: Own weights to remember: more than there are commands without an answer while a proxy restarts.
MAX_OWN = 16
#: Sources in the proxy's history that are changes; the others are start values of a process.
_CHANGE_SOURCES = ("admin", "freeze", "reload")


class CommandQueue:
    """The queue of one campaign.

    Parameters
    ----------
    campaign:
        Name at the proxy, the same for all processes of the campaign.
    by:
        Name of this process; starts with `campaign`.
    version:
        Of the weights from which a new campaign starts; None for a resumed one.
    """

    def __init__(self, campaign: str, by: str, version: int | None) -> None:
        assert by.startswith(campaign), "a process is known by its campaign"
        self.by = by
        self.version = version
        self.in_force: Mapping[str, float] | None = None
        self._campaign = campaign
        self._waiting: deque[Command] = deque()
        self._own: deque[Mapping[str, float]] = deque(maxlen=MAX_OWN)

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def next(self) -> Command | None:
        return self._waiting[0] if self._waiting else None

    def add(self, order: Command) -> None:
        """Append a command; at most one for weights, one freeze and one stop wait."""
        if isinstance(order, PutWeights | RollBack):
            self.drop_puts()
        self._waiting.append(order)

    def drop_puts(self) -> None:
        rest = [order for order in self._waiting if not isinstance(order, PutWeights | RollBack)]
        self._waiting = deque(rest)

    def done(self, order: Command) -> None:
        """Remove a command that was executed or is obsolete."""
        if self._waiting and self._waiting[0] is order:
            self._waiting.popleft()

    def see(self, found: ProxyWeights) -> None:
        """Record weights in force as expected."""
        self.version, self.in_force = found.version, dict(found.values)
        self._own.append(self.in_force)

    def mark_sent(self, values: Mapping[str, float]) -> None:
        """Record weights that may be in force whatever the answer is."""
        self._own.append(dict(values))

    def restarted(self) -> None:
        """Forget the version: a restarted proxy counts anew."""
        self.version = self.in_force = None

    def owner_of(self, found: ProxyWeights) -> Owner:
        """Return the owner of weights; unless their version is known, `found` needs `source` and `by`."""
        return "known" if found.version == self.version else self._author(found, others=self.version is None)

    def is_foreign(self, found: ProxyWeights) -> bool:
        """Return whether weights of one proxy of a group are another client's.

        Those of an earlier process of this campaign are not: a proxy may come back with them at any time.
        """
        return self._author(found, others=True) == "foreign"

    def _author(self, found: ProxyWeights, *, others: bool) -> Owner:
        """Return the author; `others`: weights of another process of the campaign are its own too."""
        if found.source == "state" and self._own:  # restored after a restart, without `by`
            return "proxy's" if dict(found.values) in self._own else "foreign"
        if found.source not in _CHANGE_SOURCES:
            return "proxy's"
        if found.by == self.by or (others and (found.by or "").startswith(self._campaign)):
            return "ours"
        return "foreign"
