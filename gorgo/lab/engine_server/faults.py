"""Faults that a test or a demonstration injects into a simulated engine.

Owns the fault of the next request. At most one fault is active; a new one replaces it. It lasts for `count`
requests that generate, or for `seconds`, or until it is replaced.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from gorgo.errors import BadRequest


class FaultKind(Enum):
    """Kind of a fault."""

    NONE = "none"
    #: The connection is reset before any answer; while it lasts without a count, on probes as well.
    REFUSE = "refuse"
    #: Status 500 after the round trip, without any work.
    ERROR = "500"
    #: The engine works, but nothing of the response ever comes.
    HANG_BEFORE_FIRST_TOKEN = "hang_before_first_token"
    #: Nothing more comes after half of the tokens.
    HANG_MID_STREAM = "hang_mid_stream"
    #: The connection is reset after half of the tokens.
    RESET_MID_STREAM = "reset_mid_stream"
    #: Every step takes `factor` times as long.
    SLOW = "slow"


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineFault:
    """One injected fault."""

    kind: FaultKind
    count: int | None = None
    seconds: float | None = None
    factor: float = 3.0


class EngineFaults:
    """The fault that is active now, if any."""

    def __init__(self) -> None:
        self._fault = EngineFault(kind=FaultKind.NONE)
        self._left: int | None = None
        self._until_s: float | None = None

    def inject(self, fault: EngineFault, *, now: float) -> None:
        self._fault = fault
        self._left = fault.count
        self._until_s = None if fault.seconds is None else now + fault.seconds

    def next_kind(self, *, now: float) -> FaultKind:
        """Return the fault of a generating request, and count it."""
        kind = self.active(now=now)
        if self._left is not None and kind is not FaultKind.NONE:
            self._left -= 1
        return kind

    def refuses_all(self, *, now: float) -> bool:
        """Whether probes are refused too."""
        return self.active(now=now) is FaultKind.REFUSE and self._left is None

    def slowdown(self, *, now: float) -> float:
        """By how much every step is longer."""
        return self._fault.factor if self.active(now=now) is FaultKind.SLOW else 1.0

    def active(self, *, now: float) -> FaultKind:
        ended = (self._left is not None and self._left <= 0) or (self._until_s is not None and now >= self._until_s)
        return FaultKind.NONE if ended else self._fault.kind


def read_fault(body: object) -> EngineFault:
    """Read the body of `POST /sim/faults`; raises `BadRequest`."""
    if not isinstance(body, Mapping):
        raise BadRequest("the body is not a JSON object")
    unknown = set(body) - {"kind", "count", "seconds", "factor"}
    if unknown:
        raise BadRequest(f"unknown {', '.join(sorted(map(str, unknown)))}; known are kind, count, seconds, factor")
    try:
        kind = FaultKind(str(body.get("kind")))
    except ValueError:
        names = ", ".join(kind.value for kind in FaultKind)
        raise BadRequest(f"kind is {body.get('kind')!r}, expected one of {names}") from None
    count = _positive(body, "count", int)
    if kind is FaultKind.SLOW and count is not None:
        raise BadRequest("slow concerns the whole engine: say for how many seconds, not a count")
    factor = _positive(body, "factor", float)
    return EngineFault(
        kind=kind,
        count=None if count is None else int(count),
        seconds=_positive(body, "seconds", float),
        factor=3.0 if factor is None else factor,
    )


def _positive(body: Mapping[str, Any], name: str, kind: type[int] | type[float]) -> float | None:
    value = body.get(name)
    if value is None:
        return None
    allowed = (int,) if kind is int else (int, float)
    if isinstance(value, bool) or not isinstance(value, allowed) or not 0 < value < 1e9:
        raise BadRequest(f"{name} must be a positive {'whole number' if kind is int else 'number'}")
    return value
