"""Says when a replica is ejected and when it is back: what an operator reads first at three in the morning.

Owns the comparison with what was said last. Why and for how long a replica is ejected is `core.health`'s.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from gorgo.proxy.logs import log

#: A replica that has just joined is in good standing until it shows otherwise.
_AT_FIRST = "healthy"
_EVENTS = {"healthy": "replica_readmitted", "ejected": "replica_ejected", "half_open": "replica_on_trial"}


class StandingLog:
    """Logs each change of standing once, as a warning."""

    def __init__(self) -> None:
        self._told: Mapping[str, str] = {}

    def tell(self, standings: Mapping[str, str]) -> None:
        """`standings` as `Router.standings` gives them, as often as one likes."""
        for replica, standing in standings.items():
            if standing != self._told.get(replica, _AT_FIRST):
                log(_EVENTS[standing], level=logging.WARNING, replica=replica)
        self._told = standings
