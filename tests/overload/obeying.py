"""Clients that come back when they are told to: how many get through, at which try, and whether it was true.

Owns the obedience and the two measures of honesty. One is what a client sees: whether it is taken when it comes back.
The other is what was so: when nobody waited at the proxy any more, against when clients were told that there is room.
"""

from __future__ import annotations

import asyncio
import time
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from gorgo.lab.replay_client import ReplayClient, ReplayOptions, ReplayRecord, open_http
from gorgo.lab.traces import TraceRequest
from tests.overload.fleet import Fleet
from tests.overload.live import LEAD_S, MAX_OPEN, MODEL, drive
from tests.overload.window import Offer

#: Of one request, the first included; who is told to stay away so often gives up.
MAX_TRIES = 6
#: For the last of them to get through after the last arrival, s.
PATIENCE_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnedAway:
    """One refusal: when, how long its client was told to stay away (None: it was not told), and which try it was."""

    at_s: float
    told_s: float | None
    attempt: int


@dataclass(slots=True, kw_only=True)
class Patient:
    """One request of an obeying client, over all its tries."""

    tries: int = 0
    through: bool = False
    away: list[TurnedAway] = field(default_factory=list)


@dataclass(frozen=True, slots=True, kw_only=True)
class Obedience:
    """What came of it; shares are of requests.

    Parameters
    ----------
    through, first_try:
        With a whole answer in the end, and at once.
    tries_mean, tries_most:
        Of those that were turned away at least once.
    taken_when_told:
        Share of comings back that were not turned away again.
    told_s_p50, room_s_p50:
        Time that clients were told, and until nobody waited; medians over refusals after which that came to be.
    untold:
        Refusals without a `Retry-After`.
    """

    offered: int
    through: float
    first_try: float
    turned_away: int
    tries_mean: float | None
    tries_most: int
    taken_when_told: float | None
    told_s_p50: float | None
    room_s_p50: float | None
    untold: int
    most_held: int


def obedient(offer: Offer, fleet: Fleet) -> Obedience:
    """Send it by obeying clients."""
    return asyncio.run(_obedient(offer, fleet))


class ObeyingClient:
    """Sends a request, and again when it is told to. One connection's worth of state per request."""

    def __init__(self, client: ReplayClient, http: httpx.AsyncClient, start_s: float) -> None:
        self._client = client
        self._start_s = start_s
        self._told: dict[str, str | None] = {}
        self.patients: list[Patient] = []
        http.event_hooks["response"].append(self._read)

    async def send(self, request: TraceRequest, body: bytes, due_s: float) -> ReplayRecord:
        """The record of the last try."""
        patient = Patient()
        self.patients.append(patient)
        while True:
            record = await self._client.send(request, body, due_s)
            patient.tries += 1
            patient.through = record.error is None
            if record.status not in (429, 503):
                return record
            told_s = _seconds(self._told.pop(record.id, None))
            now_s = time.monotonic() - self._start_s
            patient.away.append(TurnedAway(at_s=now_s, told_s=told_s, attempt=patient.tries))
            if told_s is None or patient.tries == MAX_TRIES:
                return record
            await asyncio.sleep(told_s)

    async def _read(self, response: httpx.Response) -> None:
        if response.status_code in (429, 503):
            self._told[response.request.headers["x-request-id"]] = response.headers.get("retry-after")


async def _obedient(offer: Offer, fleet: Fleet) -> Obedience:
    options = ReplayOptions(trace=Path("offer"), url=fleet.url, model=MODEL, max_in_flight=MAX_OPEN)
    async with open_http(options) as http:
        start_s = time.monotonic() + LEAD_S
        client = ReplayClient(http, options, clock=time.monotonic, start_s=start_s, run="obeying")
        clients = ObeyingClient(client, http, start_s)
        _, looks = await drive(offer, clients.send, fleet, http, start_s=start_s, patience_s=PATIENCE_S)
    return obedience(clients.patients, looks)


def obedience(patients: Sequence[Patient], looks: Sequence[tuple[float, int]]) -> Obedience:
    """Sums up. `looks` are (time of the run in s, how many waited), in order."""
    away = [refusal for patient in patients for refusal in patient.away]
    returned = [patient for patient in patients if patient.away and patient.tries > 1]
    comings_back = sum(patient.tries - 1 for patient in returned)
    again = sum(len(patient.away) - 1 for patient in returned)
    rooms = [(refusal, room_s) for refusal in away if (room_s := room_after(refusal.at_s, looks)) is not None]
    return Obedience(
        offered=len(patients),
        through=sum(patient.through for patient in patients) / len(patients),
        first_try=sum(patient.through and patient.tries == 1 for patient in patients) / len(patients),
        turned_away=sum(bool(patient.away) for patient in patients),
        tries_mean=_mean([patient.tries for patient in patients if patient.away]),
        tries_most=max((patient.tries for patient in patients), default=0),
        taken_when_told=1.0 - again / comings_back if comings_back else None,
        told_s_p50=_median([refusal.told_s for refusal, _ in rooms if refusal.told_s is not None]),
        room_s_p50=_median([room_s for _, room_s in rooms]),
        untold=sum(refusal.told_s is None for refusal in away),
        most_held=max((held for _, held in looks), default=0),
    )


def room_after(at_s: float, looks: Sequence[tuple[float, int]]) -> float | None:
    """How long after `at_s` nobody waited at the proxy; None if that was not seen any more.

    Example
    -------
    >>> room_after(1.0, [(0.5, 0), (1.5, 3), (2.5, 0)])
    1.5
    """
    later = looks[bisect_left(looks, (at_s, 0)) :]
    return next((look_s - at_s for look_s, held in later if not held), None)


def _seconds(text: str | None) -> float | None:
    """Whole seconds, as this proxy says them; anything else counts as not told."""
    return float(text) if text is not None and text.isdecimal() else None


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _median(values: Sequence[float]) -> float | None:
    return sorted(values)[len(values) // 2] if values else None
