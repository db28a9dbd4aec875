"""A source in DNS: the addresses of a name, looked up at an interval."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable

from gorgo.config.fleet import FleetSourceConfig
from gorgo.fleet_sources.entries import HostPort, Resolved, found_addresses
from gorgo.live.fleet_sources.reports import Reports

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
    return Resolved([HostPort(str(row[4][0]), port) for row in rows])


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
