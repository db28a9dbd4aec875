"""Says when a replica or a region is lost and when it is back: what an operator reads first at three in the morning.

Owns the comparison with what was said last. Why and for how long a replica is ejected is `core.fleet.outlier`'s.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Set

from gorgo.proxy.logs import log

#: A replica that has just joined is in good standing until it shows otherwise.
_INITIAL = "healthy"
_EVENTS = {"healthy": "replica_readmitted", "ejected": "replica_ejected", "half_open": "replica_on_trial"}


class HealthLog:
    """Logs each change of standing once, as a warning."""

    def __init__(self) -> None:
        self._logged: Mapping[str, str] = {}
        self._unreachable: Set[str] = frozenset()

    def log_changes(self, standings: Mapping[str, str]) -> None:
        """`standings` as `Router.standings` gives them, as often as one likes."""
        for replica, standing in standings.items():
            if standing != self._logged.get(replica, _INITIAL):
                log(_EVENTS[standing], level=logging.WARNING, replica=replica)
        self._logged = standings

    def log_region_changes(self, cut_off: Set[str]) -> None:
        """`cut_off` as `Router.unreachable_regions` has it: one line for a region, whatever it does to its replicas."""
        for region in sorted(cut_off - self._unreachable):
            log("region_unreachable", level=logging.WARNING, region=region)
        for region in sorted(self._unreachable - cut_off):
            log("region_reachable", level=logging.WARNING, region=region)
        self._unreachable = cut_off
