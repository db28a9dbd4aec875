"""What the Router returns to its shell: actions for requests, and changes of the fleet for the operator.

Owns the records. Leaves decisions to `core.dispatch` and `core.admission`, and the health of replicas to `core.fleet`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gorgo.core.messages.decision import Decision
from gorgo.core.record import record


@record
class Dispatch:
    """Send the request to `replica`; the load is already reserved under `attempt_id`.

    `attempt` counts from 1; a retry is a new Dispatch with the next number. `withhold`: the replica's last answers
    broke off or were doubtfully short, so the client is sent nothing before this one has proven longer. `fallbacks`
    are the next best replicas, best first, for a gateway that retries by itself; nothing is reserved there.
    """

    request_id: str
    attempt_id: str
    attempt: int
    replica: str
    region: str
    decision: Decision
    withhold: bool = False
    fallbacks: tuple[str, ...] = ()


@record
class Reject:
    """Answer the client with an error. Nothing was reserved. `status` is HTTP's, `code` short and stable."""

    request_id: str
    status: int
    code: str
    message: str
    retry_after_s: float | None = None


@record
class Hold:
    """Keep the request: it is queued. A later event returns its Dispatch or Reject, unless the shell abandons it."""

    request_id: str


@record
class Hedge:
    """Send the request to a second replica: `dispatch` is reserved like any other.

    The attempt with the first content is the answer. A request with content has no Hedge.
    """

    request_id: str
    dispatch: Dispatch


@record
class Cancel:
    """End this attempt: another one of its request is the answer. Its outcome is reported as `SUPERSEDED`."""

    request_id: str
    attempt_id: str


@record
class Forward:
    """Send the client the refusal of its last replica, which the shell has: no other replica will be tried."""

    request_id: str


@record
class Continue:
    """Go on with an answer at another replica: `dispatch` is reserved like any other.

    The client keeps what it has; the shell asks for the rest (`core.continuation`). The attempt before has broken off,
    or it stays open beside the new one until either brings more of the answer.
    """

    request_id: str
    dispatch: Dispatch


Action = Dispatch | Reject | Forward | Hold | Hedge | Cancel | Continue
#: For a request when it is submitted, and for one with a failed attempt.
AdmissionAction = Dispatch | Hold | Reject
RetryAction = Dispatch | Reject | Forward | Continue


@dataclass(frozen=True, slots=True)
class HealthChanged:
    """Outlier detection ejected a replica, put it on probation (`half_open`) or readmitted it.

    Of an ejection: its cause in a word (`ReplicaSnapshot.ejected_by`), its last failure in words, and its back-off, s.
    """

    replica: str
    state: Literal["healthy", "ejected", "half_open"]
    by: str | None = None
    why: str | None = None
    for_s: float | None = None


@dataclass(frozen=True, slots=True)
class RegionChanged:
    """All replicas of a region fail their probes, or one answers again."""

    region: str
    reachable: bool


@dataclass(frozen=True, slots=True)
class ReplicaRestarted:
    """An engine has started again: its counters went back, and its prefix index was emptied."""

    replica: str
    region: str


FleetEvent = HealthChanged | RegionChanged | ReplicaRestarted
