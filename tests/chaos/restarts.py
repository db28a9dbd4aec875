"""`python -m tests.chaos.restarts [--restarts N] [--rate R] [--streams N]`: successors take over under load.

`gorgo serve --processes 2` relays small requests at a steady rate and streams that are opened again when they end. One
successor after the other takes over, started by an operator (`--takeover`) as soon as the one before it serves. Clients
keep their connections for as long as the router does, and repeat nothing. Prints how long each successor took, and
whatever failed.
"""

# ruff: noqa: T201 - a command says what it found

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import httptools
import numpy as np
import uvloop

from tests.bench.relay.measure import describe_machine
from tests.bench.relay.targets import Place, gorgo
from tests.bench.relay.wire import NUMBER_BYTES, TOKEN_MARK, request
from tests.documents import ROOT
from tests.ports import free_ports

#: Of a small request, bytes; its answer comes whole.
SIZE = 500
#: A stream's tokens and their distance: it lasts for twenty seconds, several restarts.
TOKENS, GAP_MS = 100, 200
#: Whole answers of the engine have so many tokens.
ANSWERED = 128
#: Opened in one second when the load begins.
STREAMS_PER_S = 50.0
#: For a router to start, and for an old one to end its streams, on a machine that does other things too, s.
START_S, END_S = 120.0, 90.0
ANSWER_S = 60.0
#: Between a successor that serves and the next one's start, s.
PAUSE_S = 1.0


@dataclass(slots=True)
class Found:
    """What came of a run."""

    requests: int = 0
    streams: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    #: Of small requests.
    answer_s: list[float] = field(default_factory=list)
    restarts_s: list[float] = field(default_factory=list)
    #: Fewest streams that were open at the start of a successor.
    least_open: int = sys.maxsize

    def as_text(self) -> str:
        """Return the report."""
        p50, p99, most = np.quantile(self.answer_s, (0.5, 0.99, 1.0)) * 1e3
        taken = ", ".join(f"{each:.1f}" for each in self.restarts_s)
        lines = [
            f"{len(self.restarts_s)} successors took {taken} s",
            f"{self.requests} requests and {self.streams} streams were whole; at least {self.least_open} were open",
            f"requests took {p50:.1f} ms (p50), {p99:.0f} ms (p99), {most:.0f} ms (longest)",
            f"{self.failures.total()} failed",
        ]
        return "\n".join([*lines, *(f"  {count} x {why}" for why, count in self.failures.items())])


class Connection(asyncio.Protocol):
    """A client's connection, with one request at a time."""

    def __init__(self) -> None:
        self.transport: asyncio.Transport | None = None
        self.tokens = 0
        self._answer: asyncio.Future[str] | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._tail = b""

    @property
    def is_open(self) -> bool:
        """Whether another request may be sent."""
        return self.transport is not None and not self.transport.is_closing()

    async def send(self, data: bytes) -> str:
        """Return what was wrong with the answer; empty if it was whole."""
        assert self.transport is not None
        self._parser, self.tokens, self._tail = httptools.HttpResponseParser(self), 0, b""
        self._answer = asyncio.get_running_loop().create_future()
        self.transport.write(data)
        try:
            async with asyncio.timeout(ANSWER_S):
                return await self._answer
        except TimeoutError:
            return "no answer in time"
        finally:
            self._answer = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's own class

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_body(self, body: bytes) -> None:
        text = self._tail + body
        self.tokens += text.count(TOKEN_MARK)
        self._tail = text[-len(TOKEN_MARK) + 1 :]

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        if not self._parser.should_keep_alive() and self.transport is not None:
            self.transport.close()
        self._end("" if status == 200 else f"status {status}")

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        self._end(f"the connection ended before its answer: {exc!r}")

    def _end(self, why: str) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_result(why)


class Load:
    """The clients."""

    def __init__(self, port: int, found: Found) -> None:
        self._port = port
        self._found = found
        self._idle: list[Connection] = []
        self._stopping = False
        self.open_streams = 0
        self._numbers = iter(range(10**NUMBER_BYTES))
        self._small = request(SIZE, variant=1, tokens=ANSWERED, gap_ms=0, stream=False)
        self._stream = request(SIZE, variant=2, tokens=TOKENS, gap_ms=GAP_MS)

    async def run(self, rate: float, streams: int) -> None:
        """Send until `stop`, then end what is open."""
        async with asyncio.TaskGroup() as tasks:
            for number in range(streams):
                tasks.create_task(self._keep_streaming(number / STREAMS_PER_S))
            chance, loop = random.Random(0), asyncio.get_running_loop()
            due = loop.time()
            while not self._stopping:
                due += chance.expovariate(rate)
                await asyncio.sleep(due - loop.time())
                tasks.create_task(self._request())

    def stop(self) -> None:
        self._stopping = True

    async def _request(self) -> None:
        loop = asyncio.get_running_loop()
        begun_s = loop.time()
        connection = await self._connection()
        if connection is None:
            return
        why = await connection.send(self._numbered(self._small))
        if why:
            self._found.failures[f"request: {why}"] += 1
            return
        self._found.requests += 1
        self._found.answer_s.append(loop.time() - begun_s)
        if connection.is_open:
            self._idle.append(connection)

    async def _keep_streaming(self, after_s: float) -> None:
        await asyncio.sleep(after_s)
        while not self._stopping:
            connection = await self._connection()
            if connection is None:
                await asyncio.sleep(1.0)
                continue
            self.open_streams += 1
            why = await connection.send(self._numbered(self._stream))
            self.open_streams -= 1
            if not why and connection.tokens != TOKENS:
                why = f"{connection.tokens} tokens of {TOKENS}"
            if why:
                self._found.failures[f"stream: {why}"] += 1
            else:
                self._found.streams += 1
            if connection.transport is not None:
                connection.transport.close()

    async def _connection(self) -> Connection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                return connection
        try:
            _, made = await asyncio.get_running_loop().create_connection(Connection, "127.0.0.1", self._port)
        except OSError as error:
            self._found.failures[f"no connection: {error!r}"] += 1
            return None
        return made

    def _numbered(self, parts: tuple[bytes, bytes]) -> bytes:
        return b"%s%0*d%s" % (parts[0], NUMBER_BYTES, next(self._numbers), parts[1])


async def measure(folder: Path, *, restarts: int, rate: float, streams: int) -> Found:
    """Return what came of `restarts` under this load."""
    found = Found()
    (port,) = free_ports(1)
    async with _engine() as replicas, asyncio.TaskGroup() as tasks:
        # Its own ports and keys are of no matter here: every successor has the same command line.
        launch = gorgo(Place(port=port, replicas=replicas, folder=folder))
        command = [*launch.arguments, "--processes", "2", "--state", str(folder / "state.json")]
        environ = {**os.environ, **launch.environment, "PYTHONUNBUFFERED": "1"}
        running = await _started(command, environ, folder / "serve.log")
        load = Load(port, found)
        loading = tasks.create_task(load.run(rate, streams))
        ended = []
        try:
            await _until(lambda: load.open_streams == streams)
            loop = asyncio.get_running_loop()
            for _ in range(restarts):
                await asyncio.sleep(PAUSE_S)
                found.least_open = min(found.least_open, load.open_streams)
                begun_s = loop.time()
                successor = await _started([*command, "--takeover"], environ, folder / "serve.log")
                found.restarts_s.append(loop.time() - begun_s)
                ended.append(asyncio.create_task(running.wait()))
                running = successor
            async with asyncio.timeout(END_S):
                codes = await asyncio.gather(*ended)
            found.failures.update({f"a router ended with {code}": codes.count(code) for code in set(codes) - {0}})
            load.stop()
            await loading
        finally:
            load.stop()
            running.send_signal(signal.SIGTERM)
            await asyncio.wait_for(running.wait(), END_S)
    return found


async def _until(holds: object) -> None:
    assert callable(holds)
    async with asyncio.timeout(START_S):
        while not holds():
            await asyncio.sleep(0.05)


async def _started(command: list[str], environ: dict[str, str], log: Path) -> asyncio.subprocess.Process:
    with log.open("ab") as said:
        process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, stderr=said, env=environ)
    assert process.stdout is not None
    line = await asyncio.wait_for(process.stdout.readline(), START_S)
    if b"listening" not in line:
        lines = [text for text in log.read_text().splitlines() if '"event": "request"' not in text]
        raise RuntimeError("no router: " + "\n".join(lines[-20:]))
    return process


@asynccontextmanager
async def _engine() -> AsyncIterator[list[int]]:
    """The ports of three replicas."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.bench.relay.engine", "3"),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=ROOT,
    )
    assert process.stdout is not None
    assert process.stdin is not None
    try:
        yield [int(word) for word in (await process.stdout.readline()).split()]
    finally:
        process.stdin.close()  # by which it ends
        await process.wait()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.restarts", description=__doc__)
    parser.add_argument("--restarts", type=int, default=20)
    parser.add_argument("--rate", type=float, default=200.0, help="small requests a second")
    parser.add_argument("--streams", type=int, default=200)
    given = parser.parse_args()
    print(describe_machine(), flush=True)
    with tempfile.TemporaryDirectory(prefix="gorgo-restarts-") as folder:
        found = uvloop.run(measure(Path(folder), restarts=given.restarts, rate=given.rate, streams=given.streams))
    print(found.as_text())
    print(f"load average {os.getloadavg()[0]:.1f}")
    return 1 if found.failures else 0


if __name__ == "__main__":
    sys.exit(main())
