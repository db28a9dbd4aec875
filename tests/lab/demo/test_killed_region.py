from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest

from gorgo.lab.datasets import DEMO_TRACE, shipped_path
from gorgo.lab.demo.run import MODEL, DemoFleet, running_fleet
from gorgo.lab.replay import ReplayOptions, ReplayReport, replay
from gorgo.lab.traces import TraceFilters, load_trace

KILLED = "seoul-0"


async def kill_while_it_is_busy(fleet: DemoFleet) -> None:
    async with asyncio.timeout(20):
        while not await asyncio.to_thread(_in_flight, fleet):
            await asyncio.sleep(0.02)
    fleet.processes._running[KILLED].kill()


def _in_flight(fleet: DemoFleet) -> int:
    replicas = fleet._admin("/admin/fleet")["replicas"]
    return int(next(replica["in_flight_requests"] for replica in replicas if replica["name"] == KILLED))


async def replayed_with_a_kill(fleet: DemoFleet, folder: Path) -> ReplayReport:
    requests = load_trace(shipped_path(DEMO_TRACE), TraceFilters(limit=40, max_input=6000, max_output=8))
    options = ReplayOptions(
        trace=Path("t"), url=fleet.url, model=MODEL, time_scale=0.4, out=folder, show_progress=False
    )
    async with asyncio.TaskGroup() as group:
        report = group.create_task(replay(requests, options))
        group.create_task(kill_while_it_is_busy(fleet))
    return report.result()


@pytest.mark.system
def test_killing_a_region_loses_no_request_that_had_no_content_yet(tmp_path: Path) -> None:
    with running_fleet("round-robin", folder=tmp_path, seed=0) as fleet:
        report = asyncio.run(replayed_with_a_kill(fleet, tmp_path))
    rows = [json.loads(line) for line in (tmp_path / "requests.jsonl").read_text().splitlines()]
    assert len(rows) == report.row.n == 40
    assert [row for row in rows if row["error"] is not None and row["ttft_ms"] is None] == []
    assert sum(row["replica"] == KILLED for row in rows) < 13, "the killed one went on getting its third"
