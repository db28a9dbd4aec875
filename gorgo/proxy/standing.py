"""Says when a replica or a region is lost and when it is back: what an operator reads first at three in the morning.

Owns the comparison with what was said last. Why and for how long a replica is ejected is `core.health`'s.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Set

from gorgo.proxy.logs import log

#: A replica that has just joined is in good standing until it shows otherwise.
_AT_FIRST = "healthy"
_EVENTS = {"healthy": "replica_readmitted", "ejected": "replica_ejected", "half_open": "replica_on_trial"}


class StandingLog:
    """Logs each change of standing once, as a warning."""

    def __init__(self) -> None:
        self._told: Mapping[str, str] = {}
        self._cut_off: Set[str] = frozenset()

    def tell(self, standings: Mapping[str, str]) -> None:
        """`standings` as `Router.standings` gives them, as often as one likes."""
        for replica, standing in standings.items():
            if standing != self._told.get(replica, _AT_FIRST):
                log(_EVENTS[standing], level=logging.WARNING, replica=replica)
        self._told = standings

    def tell_regions(self, cut_off: Set[str]) -> None:
        """`cut_off` as `Router.regions_cut_off` has it: one line for a region, whatever it does to its replicas."""
        for region in sorted(cut_off - self._cut_off):
            log("region_cut_off", level=logging.WARNING, region=region)
        for region in sorted(self._cut_off - cut_off):
            log("region_reachable", level=logging.WARNING, region=region)
        self._cut_off = cut_off
