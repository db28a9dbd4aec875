"""The other routers as an operator reads them, and where each differs from this one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from gorgo.core.peers.exchange import PeerExchange
from gorgo.core.peers.records import PeerStatus
from gorgo.live.telemetry.peer_table import Subject

#: A router that was silent for longer is left out, s: it has been stopped.
SHOWN_S = 60.0
#: Names of drained or ejected replicas in a row.
_NAMES = 20


@dataclass(frozen=True, slots=True)
class PeerRow:
    """One peer."""

    router: str
    #: Since its last report, s.
    age_s: float
    #: Whether its load counts.
    counts: bool
    policy: str = ""
    weights_version: int = 0
    frozen: bool = False
    model: str | None = None
    draining: tuple[str, ...] = ()
    ejected: tuple[str, ...] = ()
    #: What is different here, with words for an operator.
    differences: Mapping[Subject, str] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"draining": self.draining[:_NAMES], "ejected": self.ejected[:_NAMES]}


def peer_rows(peers: PeerExchange, unreadable: Mapping[str, float], *, now: float) -> list[PeerRow]:
    """Return a row per peer, the last one heard of first; `unreadable` has times of reports of another version."""
    rows = []
    for view in peers.views(now=now):
        age_s = now - view.received_s
        status = view.status
        rows.append(
            PeerRow(
                view.router,
                age_s,
                view.counts,
                status.policy,
                status.weights_version,
                status.frozen,
                status.model,
                status.draining,
                status.ejected,
                _differences(status, peers.status(), same_key=view.same_key),
            )
        )
    for router, at_s in unreadable.items():
        rows.append(
            PeerRow(router, now - at_s, False, differences={"format": "its reports have records of another version"})
        )
    return sorted((row for row in rows if row.age_s < SHOWN_S), key=lambda row: row.age_s)


def _differences(theirs: PeerStatus, own: PeerStatus, *, same_key: bool) -> dict[Subject, str]:
    found: dict[Subject, str] = {}
    if theirs.policy != own.policy:
        found["policy"] = f"policy {theirs.policy}, here {own.policy}"
    elif theirs.weights_version != own.weights_version:
        found["weights"] = f"weights version {theirs.weights_version}, here {own.weights_version}"
    if theirs.frozen != own.frozen:
        found["freeze"] = "frozen, not here" if theirs.frozen else "not frozen, here frozen"
    if theirs.model != own.model:
        found["model"] = f"model {theirs.model or 'none'}, here {own.model or 'none'}"
    if not same_key:
        found["key"] = "another fingerprint key: its prefixes are ignored"
    return found
