"""Changes one at a time, each written before it is in force."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest

from gorgo.core.limits import BufferBudget
from gorgo.core.router import Router
from gorgo.errors import StateError
from gorgo.live.control.state_file import ConfigSnapshot, PersistedState, StateFile
from gorgo.live.control.transactions import ChangeQueue, ChangeRequest, PlannedChange, WeightsChange
from gorgo.live.telemetry.metrics import Metrics
from gorgo.policies.registry import make_policy


class Disk(StateFile):
    """Notes each write; waits while it is slow, fails while it is full."""

    def __init__(self) -> None:
        super().__init__(Path("state.json"))
        self.versions: list[int] = []
        self.full = False
        self.slow = threading.Event()
        self.slow.set()

    def write(self, kept: PersistedState) -> None:
        self.slow.wait(10)
        if self.full:
            raise StateError("no space")
        self.versions.append(kept.version)


def state(version: int) -> PersistedState:
    nothing: frozenset[str] = frozenset()
    configured = ConfigSnapshot("random", {}, nothing)
    return PersistedState(
        policy="random", weights={}, version=version, frozen=None, draining=nothing, configured=configured
    )


class Rig:
    def __init__(self, disk: Disk | None) -> None:
        router = Router([], make_policy("random"), rng=np.random.default_rng(0), boot_id="test")
        self.metrics = Metrics(router, lambda: 0.0, BufferBudget(1))
        self.queue = ChangeQueue(disk, self.metrics)
        self.applied: list[int] = []

    async def change(self, version: int) -> None:
        await self.queue.execute(lambda: PlannedChange(state(version), lambda: self.applied.append(version)))

    def writes(self, result: str) -> float:
        return self.metrics.registry.get_sample_value("gorgo_state_writes_total", {"result": result}) or 0.0


async def test_change_is_in_force_after_it_is_written_and_not_before() -> None:
    disk = Disk()
    rig = Rig(disk)
    disk.slow.clear()
    changing = asyncio.create_task(rig.change(2))
    await asyncio.sleep(0.02)
    assert (rig.applied, disk.versions, rig.queue.busy) == ([], [], True)
    disk.slow.set()
    await changing
    assert (rig.applied, disk.versions, rig.queue.busy) == ([2], [2], False)
    assert (rig.writes("written"), rig.writes("failed")) == (1.0, 0.0)


async def test_change_that_cannot_be_written_is_refused_and_the_next_one_is_not() -> None:
    disk = Disk()
    rig = Rig(disk)
    disk.full = True
    with pytest.raises(StateError):
        await rig.change(2)
    disk.full = False
    await rig.change(3)
    assert (rig.applied, disk.versions) == ([3], [3])
    assert (rig.writes("written"), rig.writes("failed")) == (1.0, 1.0)


async def test_change_goes_on_when_its_caller_leaves_and_the_end_waits_for_it() -> None:
    disk = Disk()
    rig = Rig(disk)
    disk.slow.clear()
    changing = asyncio.create_task(rig.change(2))
    await asyncio.sleep(0.02)
    changing.cancel()
    closing = asyncio.create_task(rig.queue.aclose())
    await asyncio.sleep(0)
    disk.slow.set()
    await closing
    assert (rig.applied, changing.cancelled()) == ([2], True)


async def test_end_waits_for_a_change_that_fails_too() -> None:
    disk = Disk()
    rig = Rig(disk)
    disk.slow.clear()
    disk.full = True
    changing = asyncio.create_task(rig.change(2))
    await asyncio.sleep(0.02)
    closing = asyncio.create_task(rig.queue.aclose())
    await asyncio.sleep(0)
    disk.slow.set()
    await closing
    with pytest.raises(StateError):
        await changing


async def test_nothing_else_is_changed_while_a_reload_has_its_turn() -> None:
    disk = Disk()
    rig = Rig(disk)
    async with rig.queue.paused(lambda: state(7)):
        changing = asyncio.create_task(rig.change(2))
        await asyncio.sleep(0.02)
        assert (rig.applied, disk.versions) == ([], [])
    await changing
    assert (rig.applied, disk.versions) == ([2], [7, 2])


async def test_turn_of_a_reload_ends_well_where_the_disk_refuses(caplog: pytest.LogCaptureFixture) -> None:
    disk = Disk()
    rig = Rig(disk)
    disk.full = True
    async with rig.queue.paused(lambda: state(7)):
        pass
    assert [(record.getMessage(), record.levelname) for record in caplog.records] == [("state_not_written", "ERROR")]
    assert "no space" in str(caplog.records[0].__dict__)
    assert rig.writes("failed") == 1.0


async def test_without_a_file_changes_are_in_force_and_nothing_is_written() -> None:
    rig = Rig(None)
    await rig.change(2)
    assert (rig.applied, rig.queue.durable, rig.writes("written")) == ([2], False, 0.0)
    assert Rig(Disk()).queue.durable


def test_a_change_without_options_is_the_operator_s_under_any_version_and_within_the_range() -> None:
    assert asdict(ChangeRequest()) == {
        "expected_version": None,
        "allow_out_of_range": False,
        "reason": None,
        "by": None,
        "source": "admin",
    }
    change = WeightsChange(3, "gorgo", {"w_rtt": 0.5}, "2026-05-01T00:00:00+00:00", "admin")
    assert change.as_dict() == {
        "version": 3,
        "policy": "gorgo",
        "weights": {"w_rtt": 0.5},
        "at": "2026-05-01T00:00:00+00:00",
        "source": "admin",
        "reason": None,
        "by": None,
    }
