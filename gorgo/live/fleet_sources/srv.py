"""Look-ups of SRV records by dnspython, of the extra `dns`: the system's resolver has no call for them.

Owns the names that are tried, the bounds of a look-up, and what of an answer is a target. Priority and weight of a
record are not used: the policy chooses. A look-up has a thread with an event loop of its own, since dnspython takes a
quarter of a second to read an answer of 64 KiB.
"""

from __future__ import annotations

import asyncio
import io
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from gorgo.errors import MissingExtra
from gorgo.fleet_sources.entries import HostPort, Resolved
from gorgo.live.extras import DNS

try:
    import dns.exception
    from dns.asyncresolver import Resolver
    from dns.name import Name, from_text, root
    from dns.rdtypes.IN.SRV import SRV
    from dns.resolver import NXDOMAIN, NoResolverConfiguration
except ImportError as error:
    raise MissingExtra(DNS.missing) from error

RESOLVER_FILE = Path("/etc/resolv.conf")
#: A larger file is nobody's: it has a few lines.
_MAX_FILE_BYTES = 64 * 1024
#: As resolv.conf(5): more servers and domains are not used, and names have no more dots.
_MAX_SERVERS, _MAX_DOMAINS, _MAX_NDOTS = 3, 6, 15
#: Of one server to one question, s; and of all servers to the question about one name.
ANSWER_S, NAME_S = 1.5, 5.0
#: Of an answer over UDP that no path fragments; a larger one is truncated, and comes over TCP with 64 KiB at most.
_MAX_UDP_BYTES = 1232
_LABEL = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?")


def machine_resolver() -> Resolver:
    """Return a resolver as /etc/resolv.conf says now: a network may change it while the process runs.

    Raises `OSError` if the file names a server that is no address.
    """
    resolver = Resolver(configure=False)
    try:
        with RESOLVER_FILE.open("rb") as file:
            text = file.read(_MAX_FILE_BYTES).decode(errors="replace")
        resolver.read_resolv_conf(io.StringIO(text))
    except (OSError, NoResolverConfiguration):
        resolver.nameservers = ["127.0.0.1"]  # as resolv.conf(5)
    except (ValueError, dns.exception.DNSException) as error:
        raise OSError(f"{RESOLVER_FILE}: {error}") from error
    resolver.nameservers = resolver.nameservers[:_MAX_SERVERS]
    return resolver


class SrvLookup:
    """Looks up SRV records.

    Parameters
    ----------
    resolver:
        Returns a resolver with servers and search domains; called for each look-up.
    """

    def __init__(self, resolver: Callable[[], Resolver] = machine_resolver) -> None:
        self._resolver = resolver

    async def __call__(self, host: str, port: int) -> Resolved:  # noqa: ARG002 - the records have the port
        """Return targets and ports of the first of its names that has records. Raises `OSError`."""
        tasks: list[asyncio.Task[Resolved]] = []

        def find_in_thread() -> Resolved:
            with asyncio.Runner() as runner:
                tasks.append(runner.get_loop().create_task(self._find_records(host)))
                return runner.run(_result(tasks[0]))

        try:
            return await asyncio.to_thread(find_in_thread)
        except asyncio.CancelledError:
            for task in tasks:
                with suppress(RuntimeError):  # its event loop is closed: it has ended
                    task.get_loop().call_soon_threadsafe(task.cancel)
            raise

    async def _find_records(self, host: str) -> Resolved:
        if not _is_host(host.removesuffix(".")):
            raise OSError(f"{host!r} is no name")
        resolver = self._resolver()
        resolver.timeout = ANSWER_S
        resolver.use_edns(0, 0, _MAX_UDP_BYTES)
        try:
            for name in names_to_try(host, resolver):
                found = await _targets(resolver, name)
                if found is not None:
                    return found
        except dns.exception.DNSException as error:
            raise OSError(str(error)) from error
        raise OSError(f"{host} has no SRV record")


async def _result(task: asyncio.Task[Resolved]) -> Resolved:
    return await task


def names_to_try(host: str, resolver: Resolver) -> list[Name]:
    """Return the full names for `host`, in the order in which a resolver tries them.

    dnspython has the same order, but ends at the first name that exists; resolv.conf(5) ends at the first record.
    """
    if host.endswith("."):
        return [from_text(host)]
    domains = resolver.search or ([] if resolver.domain == root else [resolver.domain])
    searched = [from_text(host, domain) for domain in domains[:_MAX_DOMAINS]]
    ndots = 1 if resolver.ndots is None else min(resolver.ndots, _MAX_NDOTS)
    return [from_text(host), *searched] if host.count(".") >= ndots else [*searched, from_text(host)]


async def _targets(resolver: Resolver, name: Name) -> Resolved | None:
    """Return targets and the shortest time to live of a name; `None` if it has none.

    Raises `DNSException` if no server answers, `OSError` for a record that is no target.
    """
    try:
        answer = await resolver.resolve(name, "SRV", lifetime=NAME_S, raise_on_no_answer=False, search=False)
    except NXDOMAIN:
        return None
    # The root says that there is no such service.
    records = [row for row in answer.rrset or () if isinstance(row, SRV) and row.target != root]
    if not records:
        return None
    return Resolved([_target(row) for row in records], float(answer.chaining_result.minimum_ttl))


def _target(record: SRV) -> HostPort:
    host = record.target.to_text(omit_final_dot=True)
    if not record.port or not _is_host(host):
        raise OSError(f"a record with the target {host[:253]!r} and port {record.port}")
    return HostPort(host, record.port)


def _is_host(name: str) -> bool:
    return len(name) <= 253 and all(_LABEL.fullmatch(label) for label in name.split("."))
