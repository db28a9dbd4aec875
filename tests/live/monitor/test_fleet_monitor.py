"""When the Router is told the time, and what probes and `gorgo check --live` agree on."""

from __future__ import annotations

import asyncio
from itertools import product
from types import SimpleNamespace
from typing import cast

import pytest

from gorgo.cli.connectivity import reach_all
from gorgo.config.fleet import ReplicaConfig
from gorgo.live.monitor.fleet_monitor import FleetMonitor, probe_overdue, run_timers
from gorgo.live.monitor.replica_monitor import ReplicaMonitor
from gorgo.live.state import Routing
from tests.answering import answering
from tests.lab.sim.live_shell import VirtualLoop
from tests.live.monitor.test_replica_monitor import PING, Watch, watched

# --- When the Router is told the time, in virtual time.


def times_told(due_s: list[float | None], run_s: float) -> list[float]:
    """When the Router hears the time, if it wants to at `due_s`, one after the other and then the last again."""

    async def run() -> list[float]:
        now, told = asyncio.get_running_loop().time, []

        def next_timer() -> float | None:
            return due_s.pop(0) if len(due_s) > 1 else due_s[0]

        router = SimpleNamespace(next_timer=next_timer)
        gateway = SimpleNamespace(run_timer=lambda: told.append(round(now(), 6)))
        timers = asyncio.create_task(
            run_timers(cast(Routing, SimpleNamespace(router=router, gateway=gateway, clock=now)))
        )
        await asyncio.sleep(run_s)
        timers.cancel()
        await asyncio.wait((timers,))
        return told

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(run())


@pytest.mark.parametrize(
    ("due_s", "told"),
    [
        ([None], [1.0, 2.0, 3.0]),
        ([1000.0], [1.0, 2.0, 3.0]),
        ([0.25, None], [0.25, 1.25, 2.25, 3.25]),
        ([0.25, 0.75, None], [0.25, 0.75, 1.75, 2.75]),
        ([-5.0, None], [0.01, 1.01, 2.01, 3.01]),
    ],
)
def test_router_is_told_the_time_when_it_wants_and_each_second_anyway(
    due_s: list[float | None], told: list[float]
) -> None:
    assert times_told(due_s, 3.5) == told


async def test_a_probe_out_of_turn_runs_once_at_a_time_and_for_replicas_of_the_fleet_alone() -> None:
    probes, answer = [], asyncio.Event()

    class Monitor:
        target = SimpleNamespace(name="a")

        async def run(self) -> None:
            await asyncio.Event().wait()

        async def probe(self) -> None:
            probes.append("a")
            await answer.wait()

    async with asyncio.TaskGroup() as tasks:
        monitors = FleetMonitor(tasks)
        monitors.start(cast(ReplicaMonitor, Monitor()))
        for name in ("a", "a", "gone"):
            monitors.probe(name)
        await asyncio.sleep(0)
        assert probes == ["a"]
        answer.set()
        await asyncio.sleep(0.01)
        answer.clear()
        monitors.probe("a")
        await asyncio.sleep(0)
        assert probes == ["a", "a"]
        monitors.stop_all()  # the one in progress too


def test_a_replica_with_overdue_requests_is_probed_out_of_turn_each_second() -> None:
    async def run() -> list[tuple[float, str]]:
        now, probed = asyncio.get_running_loop().time, []
        view = SimpleNamespace(overdue_replicas=lambda now: ["hung"] if 1.5 < now < 4.5 else [])
        routing = cast(Routing, SimpleNamespace(router=SimpleNamespace(view=view), clock=now))
        fleet = cast(FleetMonitor, SimpleNamespace(probe=lambda name: probed.append((round(now(), 6), name))))
        watching = asyncio.create_task(probe_overdue(routing, fleet))
        await asyncio.sleep(10.0)
        watching.cancel()
        await asyncio.wait((watching,))
        return probed

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        assert runner.run(run()) == [(2.0, "hung"), (3.0, "hung"), (4.0, "hung")]


# --- `gorgo check --live` and the probes of the proxy agree on every pair of answers.


STATUSES = (200, 204, 302, 401, 403, 404, 405, 429, 500, 503)
MODELS = "/v1/models"


async def checked() -> dict[tuple[int, int], bool]:
    """Whether check takes the replica for well, by the statuses of both paths."""
    found, statuses = dict[tuple[int, int], bool](), dict[str, int]()
    async with answering(lambda path: statuses.get(path, 404)) as url:
        for ping, models in product(STATUSES, STATUSES):
            statuses.update({PING: ping, MODELS: models})
            replica = ReplicaConfig(name="r", region="a", url=url, engine="sglang")
            (row,) = await asyncio.to_thread(reach_all, [replica], environ={}, timeout_s=5.0)
            found[ping, models] = row.error is None
    return found


def probed() -> dict[tuple[int, int], bool]:
    """Whether the first probe of a proxy is answered."""
    return {(ping, models): is_probed(ping, models) for ping, models in product(STATUSES, STATUSES)}


def is_probed(ping: int, models: int) -> bool:
    answers: list[bool] = []

    async def test(watch: Watch) -> None:
        watch.engine.answers |= {PING: (ping, b""), MODELS: (models, b"")}
        await watch.watcher.probe()
        answers.append(watch.view.rtt_ms is not None)

    watched(test)
    return answers == [True]


def test_check_live_and_probes_agree_on_every_pair_of_answers() -> None:
    found = asyncio.run(checked())
    assert found == probed()
    well = {pair for pair, is_well in found.items() if is_well}
    assert well == {(ping, models) for ping, models in found if ping < 300 or (ping in (404, 405) and models < 300)}
