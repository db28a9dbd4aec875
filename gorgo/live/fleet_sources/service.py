"""All sources of one proxy, each in a task, and the changes of the fleet that they cause; and a source in DNS.

Owns `FleetSources`, and `DnsSource`, which looks up the addresses of a name at an interval. Leaves clusters to
`gorgo.live.fleet_sources.kubernetes`, and SRV records to `gorgo.live.fleet_sources.srv`; each loads when configured.

Changes are collected for a moment and applied one after another, in the reloader's turn: what a source finds meanwhile
comes with the next.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Mapping

from gorgo.config.fleet import FleetSourceConfig
from gorgo.errors import ConfigError, GorgoError, MissingExtra
from gorgo.fleet_sources.entries import HostPort, Resolved, found_addresses
from gorgo.fleet_sources.fleet import FoundFleet
from gorgo.live.event_loop import Clock
from gorgo.live.fleet_sources.reports import Reports
from gorgo.live.logs import log, log_failure

#: After it a look-up counts as failed. It is waited for all the same: its thread cannot be stopped.
LOOKUP_S = 5.0

#: Looks up a name. Raises `OSError`, whose text is the reason.
Lookup = Callable[[str, int], Awaitable[Resolved]]


async def resolve_addresses(host: str, port: int) -> Resolved:
    """Return the addresses of a name, as the machine's resolver has them."""
    try:
        rows = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except UnicodeError as error:
        raise OSError(f"{host!r} is no name") from error
    return Resolved([HostPort(str(info[4][0]), port) for info in rows])


class DnsSource:
    """One source.

    A name without an answer is a failure: a resolver does not tell a service without replicas from a wrong answer, so
    the replicas stay, and those that are dead are ejected by their probes. Raises `MissingExtra` if it looks up SRV
    records without the extra `dns`.
    """

    def __init__(self, config: FleetSourceConfig, reports: Reports, lookup: Lookup | None = None) -> None:
        self._config = config
        self._reports = reports
        self._lookup = lookup or _lookup_of(config)

    async def run(self) -> None:
        """Look up until cancelled."""
        while True:
            ttl_s = await self._resolve()
            wait_s = self._config.interval_s if ttl_s is None else max(1.0, min(self._config.interval_s, ttl_s))
            await asyncio.sleep(wait_s)

    async def _resolve(self) -> float | None:
        """Look up once; return for how long the answer is valid."""
        running = asyncio.ensure_future(self._lookup(str(self._config.host), self._config.port or 0))
        try:
            done, _ = await asyncio.wait((running,), timeout=LOOKUP_S)
            if not done:
                self._reports.fail(f"no answer within {LOOKUP_S:g} s")
            answer = await running
        except OSError as error:
            self._reports.fail(error.strerror or str(error))
            return None
        finally:
            running.cancel()
        if not answer.addresses:
            self._reports.fail("an answer without an address")
            return None
        self._reports.succeed()
        # Thousands of new ones take a tenth of a second.
        self._reports.report_result(await asyncio.to_thread(found_addresses, answer.addresses, self._config))
        return answer.ttl_s


def _lookup_of(config: FleetSourceConfig) -> Lookup:
    if not config.reads_srv_records:
        return resolve_addresses
    from gorgo.live.fleet_sources.srv import SrvLookup

    return SrvLookup()


#: A rollout changes several pods at once, and each change of the fleet is probed.
COLLECT_S = 0.05
#: Before a change that failed is tried again: its cause is a file or a variable of this machine.
RETRY_S = 5.0
#: Before a source with a fault of its own starts again.
RESTART_S = 30.0


async def follow_source(config: FleetSourceConfig, reports: Reports, environ: Mapping[str, str]) -> None:
    """Follow one source until cancelled.

    Raises `ConfigError` if it needs a cluster and there is none, `MissingExtra` if its package is not installed.
    """
    if config.watches:
        from gorgo.live.fleet_sources.kubernetes import KubernetesSource

        await KubernetesSource(config, reports, environ).run()
    else:
        await DnsSource(config, reports).run()


class FleetSources:
    """The running sources.

    Parameters
    ----------
    apply:
        Brings the replicas of `fleet` into the fleet, and out of it. Raises `GorgoError`.
    environ:
        Of the process.
    """

    def __init__(
        self,
        fleet: FoundFleet,
        clock: Clock,
        apply: Callable[[], Awaitable[object]],
        *,
        environ: Mapping[str, str],
    ) -> None:
        self._found = fleet
        self._clock = clock
        self._apply = apply
        self._environ = environ
        self._changed = asyncio.Event()
        self._running: dict[str, tuple[FleetSourceConfig, asyncio.Task[None]]] = {}

    async def run(self) -> None:
        """Run until cancelled."""
        self._found.on_change = self._changed.set
        async with asyncio.TaskGroup() as tasks:
            while True:
                self._reconcile(tasks)
                await self._changed.wait()
                await asyncio.sleep(COLLECT_S)
                self._changed.clear()
                await self._change_fleet()

    def _reconcile(self, tasks: asyncio.TaskGroup) -> None:
        """Start the sources that are new or changed, and stop the others."""
        wanted = {name: source.config for name, source in self._found.sources.items()}
        for name, (config, task) in list(self._running.items()):
            if wanted.get(name) != config:
                task.cancel()
                del self._running[name]
        for name, config in wanted.items():
            if name not in self._running:
                self._running[name] = config, tasks.create_task(self._follow(config))

    async def _follow(self, config: FleetSourceConfig) -> None:
        """Follow one source until cancelled. A fault of one source ends neither the others nor the proxy."""
        reports = Reports(config.name, self._found, self._clock)
        while True:
            try:
                await follow_source(config, reports, self._environ)
            except (ConfigError, MissingExtra) as error:
                reports.fail(str(error))
            except Exception as failure:  # noqa: BLE001 - see above
                log_failure("fleet_source_failed", failure, source=config.name)
                reports.fail(f"{type(failure).__name__}; the log has the traceback")
            await asyncio.sleep(RESTART_S)

    async def _change_fleet(self) -> None:
        try:
            await self._apply()
        except GorgoError as error:
            log("fleet_not_changed", level=logging.ERROR, error=str(error))
            asyncio.get_running_loop().call_later(RETRY_S, self._changed.set)
