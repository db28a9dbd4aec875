"""What the Router tells its shell to do. Frozen, and the only answers that an event can have."""

from __future__ import annotations

from dataclasses import dataclass

from gorgo.core.decision import Decision


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


Action = Dispatch | Reject
