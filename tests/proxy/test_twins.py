"""The own HTTP and that of `gorgo serve --plain` give equal answers, samples, log lines and decisions.

`GORGO_TWIN_EXCHANGES` sets how many exchanges, `GORGO_TWIN_SEED` which. 10,000 take some minutes.
"""

from __future__ import annotations

import asyncio
import json
import os
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from gorgo.config.fleet import ReplicaConfig
from gorgo.config.model import Config, LimitsConfig, RegionConfig
from gorgo.live.monitor.replica_monitor import ReplicaMonitor
from tests.proxy.conftest import QUIET, Running, Start, until
from tests.proxy.twins import LIMIT_BYTES, Client, Engine, Got, engines, request_of

EXCHANGES = int(os.environ.get("GORGO_TWIN_EXCHANGES", "300"))
SEED = int(os.environ.get("GORGO_TWIN_SEED", "1"))
#: Measured by the machine's own clock.
TIMES = frozenset({"itl_ms_p95"})
#: Of the loop, in which both proxies read the end of a connection.
TURNS = 5
#: Of virtual time from one exchange to the next.
STEP_S = 0.05
REGIONS = {"near": 0.002, "far": 0.08, "farther": 0.15}


def config_of(made: list[Engine]) -> Config:
    rows = tuple(
        ReplicaConfig(name=f"r{each.number}", region=region, url=f"http://127.0.0.1:{each.port}", engine="openai")
        for each, region in zip(made, REGIONS, strict=True)
    )
    regions = tuple(RegionConfig(name=name) for name in REGIONS)
    limits = LimitsConfig(max_body_bytes=LIMIT_BYTES)
    return Config(proxy=replace(QUIET, region="near", policy="gorgo-ms"), regions=regions, replicas=rows, limits=limits)


def decisions(running: Running, request_id: str) -> list[dict[str, Any]]:
    """Return the decisions of a request as they can be compared."""
    found = running.state.routing.router.view.decisions(request_id)
    rows = [{**asdict(each), "terms": dict(each.terms)} for each in found]
    return json.loads(json.dumps(rows, default=lambda value: getattr(value, "tolist", lambda: repr(value))()))  # type: ignore[no-any-return]


def differences(one: dict[str, Any], other: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    return {key: (one[key], other[key]) for key in one if one[key] != other[key]}


def alike(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> set[str]:
    """Return the fields in which two lists of rows differ, those of the machine's clock aside."""
    assert len(ours) == len(theirs)
    return {key for one, other in zip(ours, theirs, strict=True) for key in differences(one, other)} - TIMES


@pytest.mark.timeout(0 if EXCHANGES > 1000 else 120)
async def test_both_forms_answer_record_and_decide_alike(
    start: Start, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    now_s = 1_000.0

    async def measure(monitor: ReplicaMonitor) -> float:
        return REGIONS[monitor.target.region]

    async def wait(_: ReplicaMonitor) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(ReplicaMonitor, "_measure", measure)
    monkeypatch.setattr(ReplicaMonitor, "run", wait)  # its loops would take connections at times of their own
    for name in ("gorgo.live.build.epoch_clock", "gorgo.live.upstream.client._read_tcp_info"):
        monkeypatch.setattr(name, lambda *_: (lambda: now_s) if not _ else None)
    monkeypatch.setattr("gorgo.live.upstream.client.idling_shrinks", lambda: False)
    async with engines(SEED, len(REGIONS)) as ours, engines(SEED, len(REGIONS)) as theirs:
        own, plain = [
            await start.proxy(config_of(made), [], plain=is_plain, request_log=tmp_path / f"{is_plain}.jsonl")
            for made, is_plain in ((ours, False), (theirs, True))
        ]
        clients = [Client(each.addresses.data) for each in (own, plain)]
        statuses: dict[int, int] = {}
        for number in range(EXCHANGES):
            now_s += STEP_S
            sent = request_of(SEED, number)
            answers: list[Got] = [await client.exchange(sent) for client in clients]
            assert answers[0] == answers[1], f"exchange {number}: {differences(*map(asdict, answers))}"
            await until(lambda: not own.state.exchanges and not plain.state.exchanges)
            await until(lambda: not any(engine.closing for engine in (*ours, *theirs)))
            for _ in range(TURNS):
                await asyncio.sleep(0)
            for one, other in zip(*(decisions(each, f"twin-{number}") for each in (own, plain)), strict=True):
                assert one == other, f"exchange {number}: {differences(one, other)}"
            statuses[answers[0].status] = statuses.get(answers[0].status, 0) + 1
        for client in clients:
            client.close()
        for one, other in zip(ours, theirs, strict=True):
            assert one.heard == other.heard
        samples = [[asdict(sample) for sample in each.state.routing.router.samples] for each in (own, plain)]
        assert alike(*samples) == set()
        await own.stop()
        await plain.stop()
    texts = [(tmp_path / f"{is_plain}.jsonl").read_text().splitlines()[1:] for is_plain in (False, True)]
    logs = [[json.loads(line) for line in lines] for lines in texts]
    assert alike(*logs) == set()
    assert len(logs[0]) > EXCHANGES / 2
    assert {200, 400, 404, 405, 413}.issubset(statuses), "the exchanges are of all kinds"
