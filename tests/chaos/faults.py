"""Carries the schedule out: each fault at its time, and the note of when it really began and ended."""

from __future__ import annotations

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic

import aiohttp

from tests.chaos.failing import FastFailure
from tests.chaos.fleet import REPLICAS, Fleet
from tests.chaos.schedule import RECOVERY_S, Kind, Planned

_INJECTED = {
    Kind.HANG: "hang_before_first_token",
    Kind.RESET: "reset_mid_stream",
    Kind.ERRORS: "500",
    Kind.SLOW: "slow",
}
#: Between two looks whether a fault may begin.
LOOK_S = 0.1
#: Before the sidecar is killed, for the first row of its database: without one a kill shows nothing.
WRITTEN_S = 10.0
#: Rows of generations as anybody can read them: no code of the tuner's is trusted for this.
_ROWS = "SELECT id, campaign_id, number, weights FROM generation ORDER BY id"


@dataclass(slots=True)
class Applied:
    """A fault as it happened; times as `monotonic` tells them."""

    planned: Planned
    began_s: float
    ended_s: float = float("inf")


@dataclass(slots=True)
class HistorySeen:
    """The sidecar's database just after it was killed: every row, or what is wrong."""

    rows: list[tuple[object, ...]] = field(default_factory=list)
    fault: str | None = None


class Saboteur:
    """Does to a fleet what was planned."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self.applied: list[Applied] = []
        self.histories: list[HistorySeen] = []
        self.reloads = self.refusals = 0

    async def run(self, planned: Sequence[Planned], *, seconds: float) -> None:
        """All that can be over by then; returns when the last fault is. One that cannot be carried out ends the run.

        A process may take longer to start than the schedule thought: then what would break its rules waits, and all
        after it come later.
        """
        began_s = monotonic()
        ends_s = began_s + seconds
        async with aiohttp.ClientSession() as session, asyncio.TaskGroup() as at_work:
            for fault in planned:
                await asyncio.sleep(max(0.0, began_s + fault.start_s - monotonic()))
                asked_s = monotonic()
                while not self._may(fault):
                    await asyncio.sleep(LOOK_S)
                began_s += monotonic() - asked_s
                if monotonic() + fault.over_s - fault.start_s > ends_s:
                    return
                applied = Applied(fault, monotonic())
                self.applied.append(applied)
                at_work.create_task(self._carry_out(session, applied))

    def _may(self, fault: Planned) -> bool:
        """The rules of `schedule`, for what really goes on."""
        now = monotonic()
        going_on = [each.planned for each in self.applied if now < each.ended_s]
        recent = [each.planned for each in self.applied if now < each.ended_s + RECOVERY_S]
        taken = {name for each in going_on for name in each.takes(REPLICAS)}
        ill = {name for each in recent for name in each.lays_low(REPLICAS)}
        well = set(REPLICAS) - ill
        if fault.kind is Kind.BLACKOUT:
            return not ill and not taken & set(REPLICAS)
        return not taken & set(fault.takes(REPLICAS)) and bool(not fault.ill or well - set(fault.lays_low(REPLICAS)))

    async def _carry_out(self, session: aiohttp.ClientSession, applied: Applied) -> None:
        fault = applied.planned
        match fault.kind:
            case Kind.KILL | Kind.RESTART:
                await self._kill(fault)
            case Kind.CUT | Kind.BLACKOUT:
                await self._cut(fault)
            case Kind.STALE:
                await self._stale(fault)
            case Kind.RELOAD:
                await self._reload(fault)
            case Kind.REFUSING | Kind.BUSY | Kind.BAD_ANSWERS:
                await self._fail_fast(fault)
            case Kind.TUNER:
                await self._kill_sidecar(fault)
            case kind:
                told = {"kind": _INJECTED[kind], "seconds": fault.length_s}
                url = self._fleet.engine_url(fault.target) + "/sim/faults"
                async with session.post(url, json=told) as answer:
                    answer.raise_for_status()
                await asyncio.sleep(fault.length_s)
        applied.ended_s = monotonic()

    async def _kill(self, fault: Planned) -> None:
        """The port is closed with the process, so the gate's doors are too."""
        gate = self._fleet.gates[fault.target]
        gate.shut()
        self._fleet.kill(fault.target)
        gate.reset()
        if fault.kind is Kind.KILL:
            await asyncio.sleep(fault.length_s)
        await self._fleet.start_engine(fault.target)
        await gate.open()

    async def _cut(self, fault: Planned) -> None:
        names = REPLICAS if fault.kind is Kind.BLACKOUT else (fault.target,)
        how = fault.variant or "refused"
        for name in names:
            self._fleet.gates[name].cut(how)
        await asyncio.sleep(fault.length_s)
        for name in names:
            await self._fleet.gates[name].mend(how)

    async def _stale(self, fault: Planned) -> None:
        gate = self._fleet.gates[fault.target]
        if fault.variant == "frozen":
            await gate.freeze_figures()
        else:
            gate.figures = "hang"
        await asyncio.sleep(fault.length_s)
        gate.figures = "told"

    async def _fail_fast(self, fault: Planned) -> None:
        gate = self._fleet.gates[fault.target]
        gate.failure = FastFailure(fault.variant)
        await asyncio.sleep(fault.length_s)
        gate.failure = None

    async def _reload(self, fault: Planned) -> None:
        """An edit and, later, its opposite; each by SIGHUP."""
        async with self._edited(fault):
            await asyncio.sleep(fault.length_s)

    @asynccontextmanager
    async def _edited(self, fault: Planned) -> AsyncIterator[None]:
        edits, name = self._fleet.edits, fault.target
        marks = {
            "leave": edits.left_out,
            "drain": edits.draining,
            "move": edits.moved,
            "wrong-path": edits.wrong_path,
        }.get(fault.variant)
        if marks is not None:
            marks.add(name)
        edits.broken = fault.variant == "refused"
        edits.limits = {"stream_idle_timeout_s": 3.5} if fault.variant == "limits" else {}
        await self._tell()
        yield
        if marks is not None:
            marks.discard(name)
        edits.broken, edits.limits = False, {}
        await self._tell()

    async def _tell(self) -> None:
        await self._fleet.reload()
        self.refusals += self._fleet.edits.broken
        self.reloads += not self._fleet.edits.broken

    async def _kill_sidecar(self, fault: Planned) -> None:
        await self._rows_written()
        self._fleet.kill("tune")
        self.histories.append(await asyncio.to_thread(read_history, self._fleet.database))
        await asyncio.sleep(fault.length_s)
        await self._fleet.start_sidecar()

    async def _rows_written(self) -> None:
        """Wait for a generation in the database; without one in time, go on, and the run is judged by that."""
        with suppress(TimeoutError):
            async with asyncio.timeout(WRITTEN_S):
                while not (await asyncio.to_thread(read_history, self._fleet.database)).rows:
                    await asyncio.sleep(LOOK_S)


def read_history(path: Path) -> HistorySeen:
    """Check the whole file and read all generations."""
    try:
        with closing(sqlite3.connect(path, timeout=10)) as database:
            said = [str(row[0]) for row in database.execute("PRAGMA integrity_check")]
            if said != ["ok"]:
                return HistorySeen(fault="; ".join(said))
            return HistorySeen(rows=list(database.execute(_ROWS)))
    except sqlite3.Error as error:
        return HistorySeen(fault=f"{type(error).__name__}: {error}")
