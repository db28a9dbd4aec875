"""The background loops of a whole fleet: which are at work, the first look at all replicas, and telling the time.

Owns their tasks. What is asked of one replica is `probes`'.
"""

from __future__ import annotations

import asyncio

from gorgo.proxy.monitor.replica_monitor import ReplicaMonitor
from gorgo.proxy.state import RunningProxy


class FleetMonitor:
    """The watchers of a fleet at work, one task each in the task group of whoever owns them."""

    def __init__(self, tasks: asyncio.TaskGroup) -> None:
        self._tasks = tasks
        self._at_work: dict[str, tuple[ReplicaMonitor, asyncio.Task[None]]] = {}

    def start(self, watcher: ReplicaMonitor) -> None:
        name = watcher.target.name
        assert name not in self._at_work, f"{name} is watched already"
        self._at_work[name] = watcher, self._tasks.create_task(watcher.run())

    def stop(self, name: str) -> asyncio.Task[None]:
        """Cancel the loops of one replica. Answers their task, which ends soon."""
        _, task = self._at_work.pop(name)
        task.cancel()
        return task

    def restart(self) -> None:
        """Begin all intervals anew, as they are in the configuration by now."""
        for name, (watcher, _) in list(self._at_work.items()):
            self.stop(name)
            self.start(watcher)

    def stop_all(self) -> None:
        for name in list(self._at_work):
            self.stop(name)


async def probe_all(watchers: list[ReplicaMonitor]) -> None:
    """Probe all replicas once, concurrently, for at most `FIRST_PROBE_TIMEOUT_S`, before the first request."""
    looks = await asyncio.gather(*(watcher.probe_once() for watcher in watchers))
    for watcher, look in zip(watchers, looks, strict=True):
        watcher.publish(look)


async def run_timers(state: RunningProxy) -> None:
    """Run the Router's timers when they are due, and each second: any event can bring them forward."""
    while True:
        due = state.router.next_timer()
        wait_s = 1.0 if due is None else min(1.0, max(0.0, due - state.clock()))
        await asyncio.sleep(max(wait_s, 0.01))
        state.gateway.run_timer()
