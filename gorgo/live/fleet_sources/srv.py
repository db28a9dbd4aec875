"""Look-ups of SRV records: the machine's name servers over UDP, and over TCP where an answer does not fit.

The system's resolver has no call for them.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from gorgo.fleet_sources.dns import Resolved
from gorgo.fleet_sources.srv import (
    ResolverFile,
    SrvAnswer,
    SrvError,
    names_to_try,
    read_resolver_file,
    read_srv_answer,
    srv_question,
)

RESOLVER_FILE = Path("/etc/resolv.conf")
_MAX_FILE_BYTES = 64 * 1024
#: Of one server to one question.
ANSWER_S = 1.5
#: Questions to each server, because a datagram may be lost.
_ROUNDS = 2
_PORT = 53

#: Reads a message; `None` is no answer to the question.
_Reader = Callable[[bytes], SrvAnswer | None]


def machine_resolver() -> ResolverFile:
    """Return what /etc/resolv.conf says now: a network may change it while the process runs."""
    try:
        with RESOLVER_FILE.open("rb") as file:
            return read_resolver_file(file.read(_MAX_FILE_BYTES).decode(errors="replace"))
    except OSError:
        return ResolverFile()


class SrvLookup:
    """Looks up SRV records.

    Parameters
    ----------
    resolver:
        Returns servers and search domains; called for each look-up.
    port:
        Of the servers.
    """

    def __init__(self, resolver: Callable[[], ResolverFile] = machine_resolver, port: int = _PORT) -> None:
        self._resolver = resolver
        self._port = port

    async def __call__(self, host: str, port: int) -> Resolved:  # noqa: ARG002 - the records have the port
        """Return targets and ports of the first of its names that has records. Raises `OSError`."""
        file = self._resolver()
        for name in names_to_try(host, file):
            answer = await self._first_answer(name, file)
            if not answer.missing:
                return Resolved(answer.targets, answer.ttl_s)
        raise OSError(f"{host} has no SRV record")

    async def _first_answer(self, name: str, file: ResolverFile) -> SrvAnswer:
        """Return the answer of the first server that has one."""
        reason = ""
        for server in file.servers * _ROUNDS:
            try:
                return await asyncio.wait_for(self._answer(name, server), ANSWER_S)
            except TimeoutError:
                reason = f"the name server {server} does not answer"
            except (OSError, SrvError, EOFError) as error:
                reason = f"{server}: {error}"
        raise OSError(reason)

    async def _answer(self, name: str, server: str) -> SrvAnswer:
        number = secrets.randbelow(1 << 16)
        question = srv_question(name, number)
        answer = await self._datagram_answer(question, server, lambda message: read_srv_answer(message, name, number))
        if not answer.truncated:
            return answer
        whole = read_srv_answer(await self._stream_answer(question, server), name, number)
        if whole is None or whole.truncated:
            raise SrvError("an answer to another question")
        return whole

    async def _datagram_answer(
        self, question: bytes, server: str, read: Callable[[bytes], SrvAnswer | None]
    ) -> SrvAnswer:
        loop = asyncio.get_running_loop()
        receiver = _Receiver(read, loop.create_future())
        transport, _ = await loop.create_datagram_endpoint(lambda: receiver, remote_addr=(server, self._port))
        try:
            transport.sendto(question)
            return await receiver.answer
        finally:
            transport.close()

    async def _stream_answer(self, question: bytes, server: str) -> bytes:
        reader, writer = await asyncio.open_connection(server, self._port)
        try:
            writer.write(len(question).to_bytes(2) + question)
            return await reader.readexactly(int.from_bytes(await reader.readexactly(2)))
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()


class _Receiver(asyncio.DatagramProtocol):
    """The first datagram that answers the question; others on the socket are no answer of it."""

    def __init__(self, read: _Reader, answer: asyncio.Future[SrvAnswer]) -> None:
        self._read = read
        self.answer = answer

    def datagram_received(self, data: bytes, addr: tuple[str | int, int]) -> None:  # noqa: ARG002 - the interface
        if self.answer.done():
            return
        try:
            answer = self._read(data)
        except SrvError as error:
            self.answer.set_exception(error)
            return
        if answer is not None:
            self.answer.set_result(answer)

    def error_received(self, exc: Exception) -> None:
        if not self.answer.done():
            self.answer.set_exception(exc)
