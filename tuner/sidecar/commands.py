"""What the proxy is to be told, and whose the weights are that are found there. Without input and output.

Owns the queue of orders and the version that the tuner knows. The calls are the loop's.

Theory of operation: a put goes through only if the version is still the one that the tuner knows, so nobody's change is
ever overwritten unseen. An order without an answer may have been carried out all the same; every change bears the name
of the process that made it (`by`), and by that the tuner knows its own. Only the newest order for weights is worth
carrying out: a newer one replaces it in the queue.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from typing import Literal

from tuner.campaign.actions import Freeze, PutWeights, RollBack, Stop
from tuner.proxy_client import ProxyWeights

Command = PutWeights | RollBack | Freeze | Stop
Owner = Literal["known", "ours", "proxy's", "foreign"]

#: Weights that were ours lately: as many as orders can be without an answer while a proxy comes and goes.
MAX_OWN = 16
#: Sources in the proxy's history that are somebody's wish; the others are what a process starts with.
_CHANGE_SOURCES = ("admin", "freeze", "reload")


class CommandQueue:
    """The queue of one campaign.

    Parameters
    ----------
    campaign:
        What all processes of this campaign call themselves at the proxy.
    by:
        What this process does; begins with `campaign`.
    version:
        The one whose weights were seen, where the campaign starts from them; None where it was started before.
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
        """At most one order for weights, one freeze and one stop wait: there is no bound to mind."""
        if isinstance(order, PutWeights | RollBack):
            self.drop_puts()
        self._waiting.append(order)

    def drop_puts(self) -> None:
        rest = [order for order in self._waiting if not isinstance(order, PutWeights | RollBack)]
        self._waiting = deque(rest)

    def done(self, order: Command) -> None:
        """It was carried out, or cannot be any more."""
        if self._waiting and self._waiting[0] is order:
            self._waiting.popleft()

    def see(self, found: ProxyWeights) -> None:
        """These are in force, and that is in order."""
        self.version, self.in_force = found.version, dict(found.values)
        self._own.append(self.in_force)

    def mark_sent(self, values: Mapping[str, float]) -> None:
        """These are about to be put, and may be in force whatever the answer is."""
        self._own.append(dict(values))

    def restarted(self) -> None:
        """Another run of the proxy: its versions begin anew."""
        self.version = self.in_force = None

    def owner_of(self, found: ProxyWeights) -> Owner:
        """Who put these weights in force; `found` has been asked with who set them unless the version is known."""
        if found.version == self.version:
            return "known"
        if found.source == "state" and self._own:  # kept over a restart: whoever set them is forgotten
            return "proxy's" if dict(found.values) in self._own else "foreign"
        if found.source not in _CHANGE_SOURCES:
            return "proxy's"
        if found.by == self.by or (self.version is None and (found.by or "").startswith(self._campaign)):
            return "ours"
        return "foreign"
