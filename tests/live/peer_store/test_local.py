"""When a worker reports to those beside it, in virtual time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest

from gorgo.core.messages.actions import Dispatch
from gorgo.core.peers.exchange import HEARTBEAT_S
from gorgo.live.event_loop import RouterGateway
from gorgo.live.peer_store.local import INTERVAL_S, LocalPeers
from gorgo.live.workers.link import WorkerLink
from gorgo.live.workers.reports import SharedReports
from tests.core.routers import COMPLETED, PROMPT, a_request, make_router
from tests.lab.sim.live_shell import VirtualLoop


class Linked:
    """In place of a worker's link."""

    number = 0

    def __init__(self) -> None:
        self.on_ended: list[Callable[[int], None]] = []


class Turns:
    """In place of the memory: when it was read and written."""

    def __init__(self, time: Callable[[], float]) -> None:
        self._time = time
        self.read_s: list[float] = []
        self.written_s: list[float] = []

    def read(self) -> Iterator[tuple[int, bytes]]:
        self.read_s.append(self._time())
        return iter(())

    def write(self, report: bytes) -> bool:
        assert report
        self.written_s.append(self._time())
        return True


class Exchange:
    """In place of a request's exchange."""

    def deliver(self, action: object) -> None:
        raise AssertionError(action)


def test_a_worker_reports_each_change_within_its_interval_and_sleeps_while_streams_go_on() -> None:
    async def run() -> None:
        time = asyncio.get_running_loop().time
        router, turns = make_router("a", "b", policy="gorgo-ms"), Turns(time)
        gateway = RouterGateway(router, time, lambda _: None)
        peers = LocalPeers(
            cast(WorkerLink, Linked()), cast(SharedReports, turns), router, gateway, time, key_id="one key"
        )
        task = asyncio.create_task(peers.run())
        await asyncio.sleep(0.7)

        async def reported_after(event: Callable[[], Any]) -> Any:
            """Let an event happen between two heartbeats; the change is written once, and nothing is done after it."""
            found, began_s = event(), time()
            await asyncio.sleep(0.15)
            written = [at_s for at_s in turns.written_s if at_s > began_s]
            assert written == pytest.approx([began_s + INTERVAL_S]), event
            assert len([at_s for at_s in turns.read_s if at_s > began_s]) <= 2, event
            await asyncio.sleep(0.7 - 0.15)
            return found

        gateway.register("r", Exchange())
        sent = await reported_after(lambda: gateway.submit(a_request("r", blocks=PROMPT)))
        assert isinstance(sent, Dispatch)
        await reported_after(lambda: gateway.first_token(sent.attempt_id, now=time()))
        await reported_after(lambda: gateway.finish(sent, COMPLETED))
        idle = [at_s for at_s in turns.written_s if at_s > time() - 0.8]
        assert len(idle) <= 0.8 / HEARTBEAT_S + 1, "an idle worker says that it is there, and nothing else"
        task.cancel()
        gateway.close()

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(run())
