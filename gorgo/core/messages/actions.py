"""What the Router tells its shell to do. Frozen, and the only answers that an event can have."""

from __future__ import annotations

from dataclasses import dataclass

from gorgo.core.messages.decision import Decision


@dataclass(frozen=True, slots=True)
class Dispatch:
    """Send the request to `replica`; the load is already reserved under `attempt_id`.

    `attempt` counts from 1; a retry is a new Dispatch with the next number.
    """

    request_id: str
    attempt_id: str
    attempt: int
    replica: str
    region: str
    decision: Decision


@dataclass(frozen=True, slots=True)
class Reject:
    """Answer the client with an error: nothing was reserved. `status` is HTTP, `code` a short stable word."""

    request_id: str
    status: int
    code: str
    message: str
    retry_after_s: float | None = None


@dataclass(frozen=True, slots=True)
class Hold:
    """Keep the request: a Dispatch or a Reject for it comes from a later event, unless the shell abandons it."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Hedge:
    """Send the request to another replica as well: `dispatch` is reserved like any other.

    The attempt whose first content comes first is the answer. From one whose content was sent on there is no Hedge.
    """

    request_id: str
    dispatch: Dispatch


@dataclass(frozen=True, slots=True)
class Cancel:
    """End this attempt: another one of its request has answered. Its end is told like any other, as `SUPERSEDED`."""

    request_id: str
    attempt_id: str


Action = Dispatch | Reject | Hold | Hedge | Cancel
#: For a request when it is submitted, and for one with a failed attempt.
AdmissionAction = Dispatch | Hold | Reject
RetryAction = Dispatch | Reject
