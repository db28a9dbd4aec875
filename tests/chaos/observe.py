"""Looks at the proxy from outside and inside: memory, descriptors, tasks, ledger, index, state file."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

import httpx

from gorgo.errors import ConfigError
from gorgo.live.control.state_file import StateFile
from tests.chaos.fleet import TOKEN, Fleet

#: Between two looks under load, and before and after it.
LOOK_S, IDLE_LOOK_S = 1.0, 0.5
#: Idle looks that make the measure to which everything must come back, over more than two of the proxy's pings of
#: kept connections (2 s) and its probes (1 s).
IDLE_LOOKS = 10
#: Connections that an idle proxy has to a replica: two pings, a probe and a scrape may be under way at once.
KEPT_PER_REPLICA = 4
#: For what is closed late: kept connections (4 s), pings and probes that hang (5 s), a scrape that hangs (10 s).
SETTLE_S = 30.0
#: For a replica that was ejected in vain several times: the longest back-off (60 s), and a probe.
READMITTED_S = 65.0


@dataclass(frozen=True, slots=True)
class Look:
    """What was seen at one moment. `inside` is the answer of `GET /admin/check`."""

    at_s: float
    rss_kb: int
    descriptors: int
    inside: Mapping[str, Any]
    #: Why the state file is none, if it is none.
    state_fault: str | None = None
    #: How long the proxy took to answer.
    took_s: float = 0.0

    @property
    def open_things(self) -> dict[str, int]:
        """Everything that must be zero when nobody asks for anything."""
        inside = self.inside
        counts = {name: int(inside[name]) for name in ("in_flight", "queued", "exchanges", "draining")}
        return counts | {name: sum(inside[name].values()) for name in ("active", "open_responses")}

    @property
    def kept(self) -> int:
        """Connections to replicas that the proxy keeps."""
        return sum(self.inside["connections"].values())

    @property
    def other_descriptors(self) -> int:
        """All but those."""
        return self.descriptors - self.kept

    @property
    def tasks(self) -> int:
        return sum(self.inside["tasks"].values())


@dataclass(slots=True)
class Watch:
    """Looks before, while and after the load, and what the proxy counted and logged."""

    before: list[Look] = field(default_factory=list)
    during: list[Look] = field(default_factory=list)
    after: list[Look] = field(default_factory=list)


def _rss_kb(status: str) -> int:
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS:"))


class Observer:
    """Looks at the proxy of a fleet; one connection of its own, kept open."""

    def __init__(self, fleet: Fleet, admin: httpx.AsyncClient) -> None:
        self._fleet = fleet
        self._admin = admin
        self._state_file = StateFile(fleet.state_file)
        self.watch = Watch()

    async def look(self) -> Look:
        asked_s = monotonic()
        inside = (await self._admin.get("/admin/check")).raise_for_status().json()
        took_s = monotonic() - asked_s
        processes = [Path(f"/proc/{pid}") for pid in self._fleet.serving_pids()]
        rss_kb = sum(_rss_kb((process / "status").read_text()) for process in processes)
        descriptors = sum(len(list((process / "fd").iterdir())) for process in processes)
        return Look(monotonic(), rss_kb, descriptors, inside, self._state_fault(), took_s)

    async def before(self, looks: int) -> None:
        for _ in range(looks):
            await asyncio.sleep(IDLE_LOOK_S)
            self.watch.before.append(await self.look())

    async def during(self) -> None:
        """Until cancelled."""
        while True:
            self.watch.during.append(await self.look())
            await asyncio.sleep(LOOK_S)

    async def after(self) -> None:
        """Until everything is as it was before, or the time for that is over."""
        deadline_s = monotonic() + SETTLE_S
        while True:
            await asyncio.sleep(IDLE_LOOK_S)
            look = await self.look()
            self.watch.after.append(look)
            if not left_over(self.watch) or look.at_s > deadline_s:
                return

    async def fleet_rows(self) -> list[dict[str, Any]]:
        """The proxy's own view of its replicas, as soon as all are healthy or the longest back-off is over."""
        deadline_s = monotonic() + READMITTED_S
        while True:
            rows: list[dict[str, Any]] = (await self._admin.get("/admin/fleet")).raise_for_status().json()["replicas"]
            if all(row["state"] == "healthy" for row in rows) or monotonic() > deadline_s:
                return rows
            await asyncio.sleep(IDLE_LOOK_S)

    def _state_fault(self) -> str | None:
        try:
            return None if self._state_file.read() is not None else "there is no state file"
        except ConfigError as error:
            return str(error)


def left_over(watch: Watch) -> dict[str, int]:
    """What never came back to nothing, or to what it was before the load; by name, the least that was seen of it.

    Each for itself: probes and pings go on, so that something of theirs is open at many a look.
    """
    least = {name: min(look.open_things[name] for look in watch.after) for name in watch.after[-1].open_things}
    for name in ("other_descriptors", "tasks"):
        least[name] = min(getattr(look, name) for look in watch.after)
        if least[name] <= max(getattr(look, name) for look in watch.before):
            least[name] = 0
    kept = min(look.kept for look in watch.after)
    least["kept"] = kept if kept > KEPT_PER_REPLICA * len(watch.after[-1].inside["connections"]) else 0
    return {name: count for name, count in least.items() if count}


def admin_client(fleet: Fleet) -> httpx.AsyncClient:
    headers = {"authorization": f"Bearer {TOKEN}"}
    return httpx.AsyncClient(base_url=fleet.admin_url, headers=headers, timeout=20.0, trust_env=False)


def events_of(text: str) -> list[dict[str, Any]]:
    """The JSON lines of a process's output; what is none is left out."""
    return [json.loads(line) for line in text.splitlines() if line.startswith("{")]
