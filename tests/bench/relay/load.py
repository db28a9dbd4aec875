"""The load generator, a process of its own: for each job on standard input one line of figures on standard output.

Reads the relay's CPU time and memory itself, at the instants at which it starts and stops to count, so that the figures
of a window belong to the requests and events of that window.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import os
import random
import select
import socket
import ssl
import sys
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import cast

import numpy as np
import uvloop

from tests.bench.relay.measure import process_tree, relay_times, resident_bytes
from tests.bench.relay.scenarios import Figures, Job
from tests.bench.relay.wire import NUMBER_BYTES, TOKEN_MARK, ResponseReader, request

# --- Streams that stay open: their events counted and the gaps between them measured, with sockets and epoll alone.
#
# Owns the jobs of the kind `hold`. An event loop would cost more per event than the relays under test: 120,000 events
# a second have to fit beside the engine on one core. Reads of one poll share an instant, and one poll has 64 at most.


_SETTLE_S = 0.3
_CONNECT_S_MAX = 5.0
#: Streams that start together, and the pause until the next: a relay meets a brisk ramp, not a storm of connects.
_RAMP, _RAMP_S = 25, 0.01
_POLL_EVENTS = 64
_RECEIVED_MAX = 1 << 18
_MARK_TAIL = len(TOKEN_MARK) - 1


def hold(job: Job, numbered: Callable[[], bytes], context: ssl.SSLContext | None) -> Figures:
    """Open the streams, count for `seconds` when all run, close them. Raises `OSError` if they do not all start."""
    held = _Held(job, numbered, context)
    # The engine, on the same core, ends its step before the load reads: fewer switches, and polls with many events.
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    try:
        return held.run()
    finally:
        os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
        held.close()


class _Stream:
    """A connection with a response that does not end, and the tokens of it."""

    def __init__(self, connection: socket.socket, request: bytes) -> None:
        self.connection = connection
        self.tokens = 0
        self.last_s = 0.0
        self._tail = b""
        self._answered = False
        connection.sendall(request)
        connection.setblocking(False)

    def read(self) -> int:
        """Return the tokens of what has come. Raises `OSError` at the end of the connection or for another status."""
        try:
            data = self.connection.recv(_RECEIVED_MAX)
        except (BlockingIOError, ssl.SSLWantReadError):
            return 0
        if not data:
            raise ConnectionResetError("the connection closed in the middle of a response")
        if isinstance(self.connection, ssl.SSLSocket):  # a record that was read ahead makes no event
            while pending := self.connection.pending():
                data += self.connection.recv(pending)
        if not self._answered:
            if not data.startswith(b"HTTP/1.1 200"):
                raise ConnectionResetError(f"no stream: {data[:60]!r}")
            self._answered = True
        data = self._tail + data
        tokens = data.count(TOKEN_MARK)
        # Less than a mark, so that none is counted twice; nearly every read ends with a line.
        self._tail = b"" if data.endswith(b"\n") else data[-_MARK_TAIL:]
        self.tokens += tokens
        return tokens


class _Held:
    def __init__(self, job: Job, numbered: Callable[[], bytes], context: ssl.SSLContext | None) -> None:
        self._job, self._numbered, self._context = job, numbered, context
        self._epoll = select.epoll()
        self._streams: dict[int, _Stream] = {}
        self._waiting = 0
        self._figures = Figures()
        self._processes: Sequence[int] = [] if job.process is None else process_tree(job.process)
        self._ports = ports(job)

    def run(self) -> Figures:
        figures = self._figures
        figures.resident_before = resident_bytes(self._processes)
        until_s = time.perf_counter() + self._job.open_s
        for begun in range(0, self._job.connections, _RAMP):
            for _ in range(min(_RAMP, self._job.connections - begun)):
                self._open()
            if time.perf_counter() > until_s:
                raise TimeoutError(f"{len(self._streams)} streams were opened in {self._job.open_s:g} s")
            self._poll(time.perf_counter() + _RAMP_S)
            if self._job.most_waiting is not None:
                self._await_tokens(self._job.most_waiting, until_s)
        self._await_tokens(0, until_s)
        self._poll(time.perf_counter() + _SETTLE_S)
        for stream in self._streams.values():
            stream.last_s = 0.0
        before, started_s, times = self._tokens(), time.perf_counter(), relay_times(self._processes)
        gaps = self._poll(started_s + self._job.seconds)
        figures.tokens = self._tokens() - before
        figures.wall_s = time.perf_counter() - started_s
        figures.cpu_s, figures.first_cpu_s, figures.waited_s = (
            now - then for now, then in zip(relay_times(self._processes), times, strict=True)
        )
        figures.requests = len(self._streams)
        figures.resident_after = resident_bytes(self._processes)
        if gaps:
            figures.gap_s = [float(at) for at in np.quantile(np.frombuffer(gaps), (0.5, 0.99, 1.0))]
        return figures

    def _await_tokens(self, most_waiting: int, until_s: float) -> None:
        """Read until no more than so many streams wait for their first token."""
        while self._waiting > most_waiting:
            if time.perf_counter() > until_s:
                raise TimeoutError(f"{self._waiting} streams without a token")
            self._poll(time.perf_counter() + 0.01)

    def close(self) -> None:
        for stream in self._streams.values():
            stream.connection.close()
        self._epoll.close()

    def _open(self) -> None:
        connection = socket.create_connection(("127.0.0.1", next(self._ports)), timeout=_CONNECT_S_MAX)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._context is not None:
            connection = self._context.wrap_socket(connection)
        stream = _Stream(connection, self._numbered())
        self._streams[connection.fileno()] = stream
        self._waiting += 1
        self._epoll.register(connection.fileno(), select.EPOLLIN)

    def _poll(self, until_s: float) -> array[float]:
        """Read until then, and return the gaps between two reads of a stream."""
        gaps, poll, streams = array("d"), self._epoll.poll, self._streams
        while (now_s := time.perf_counter()) < until_s:
            events = poll(until_s - now_s, _POLL_EVENTS)
            now_s = time.perf_counter()
            for fd, _ in events:
                stream = streams[fd]
                known = stream.tokens
                if not stream.read():
                    continue
                if not known:
                    self._waiting -= 1
                elif stream.last_s:
                    gaps.append(now_s - stream.last_s)
                stream.last_s = now_s
        return gaps

    def _tokens(self) -> int:
        return sum(stream.tokens for stream in self._streams.values())


_VARIANTS = 16
_OPEN_S_MAX = 30.0


class _Client(asyncio.Protocol):
    """One connection and the request on it."""

    def __init__(self, done: Callable[[_Client], None], lost: Callable[[str], None]) -> None:
        self.reader = ResponseReader()
        self.first_token_s: float | None = None
        self.busy = False
        self.transport: asyncio.Transport | None = None
        self._sent_s = 0.0
        self._done, self._lost = done, lost

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)  # uvloop's own class

    def send(self, data: bytes, sent_s: float) -> None:
        assert self.transport is not None
        self.reader.start()
        self.busy, self.first_token_s, self._sent_s = True, None, sent_s
        self.transport.write(data)

    def data_received(self, data: bytes) -> None:
        try:
            complete = self.reader.feed(data)
        except (ValueError, KeyError) as error:
            self._fail(f"unreadable response: {error!r}")
            return
        if self.first_token_s is None and self.reader.tokens:
            self.first_token_s = time.perf_counter() - self._sent_s
        if complete:
            self.busy = False
            self._done(self)

    def connection_lost(self, exc: Exception | None) -> None:
        self.transport = None
        if self.busy:
            self._fail("the connection closed in the middle of a response")

    def close(self) -> None:
        self.busy = False
        if self.transport is not None:
            self.transport.abort()

    def _fail(self, why: str) -> None:
        self.close()
        self._lost(why)


class _Load:
    """Runs one job."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._figures = Figures()
        self._numbered, self._context = _numbered(job), _trusting(job)
        self._idle: list[_Client] = []
        self._clients: list[_Client] = []
        self._processes = [] if job.process is None else process_tree(job.process)
        self._ports = ports(job)

    async def run(self) -> Figures:
        try:
            await {"closed": self._closed, "paced": self._paced}[self._job.kind]()
        finally:
            for client in self._clients:
                client.close()
        return self._figures

    async def _closed(self) -> None:
        await self._connect(self._job.connections)
        started = self._times()
        for client in list(self._idle):
            self._send(client)
        self._idle.clear()
        await asyncio.sleep(self._job.seconds)
        await self._drained()
        self._close_window(started)

    async def _paced(self) -> None:
        await self._connect(self._job.connections)
        rng = random.Random(0)
        loop = asyncio.get_running_loop()
        started = self._times()
        due = loop.time()
        for _ in range(int(self._job.rate * self._job.seconds)):
            due += rng.expovariate(self._job.rate)
            await asyncio.sleep(due - loop.time())
            if not self._idle:
                await self._connect(1)
            self._send(self._idle.pop())
        await self._drained()
        self._close_window(started)

    def _send(self, client: _Client) -> None:
        client.send(self._numbered(), time.perf_counter())

    def _done(self, client: _Client) -> None:
        reader, figures, job = client.reader, self._figures, self._job
        if reader.status == 200 and reader.tokens == job.tokens * job.stream:
            figures.requests += 1
            figures.tokens += reader.tokens
            if client.first_token_s is not None:
                figures.ttft_s.append(client.first_token_s)
        else:
            figures.bad += 1
            figures.problem = f"status {reader.status} with {reader.tokens} tokens"
        if job.kind == "closed" and time.perf_counter() < self._end_s:
            self._send(client)
        else:
            self._idle.append(client)

    def _lost(self, why: str) -> None:
        self._figures.bad += 1
        self._figures.problem = why

    async def _connect(self, count: int) -> None:
        loop = asyncio.get_running_loop()
        for _ in range(count):
            _, client = await loop.create_connection(
                lambda: _Client(self._done, self._lost), "127.0.0.1", next(self._ports), ssl=self._context
            )
            self._clients.append(client)
            self._idle.append(client)
        self._end_s = time.perf_counter() + self._job.seconds

    async def _drained(self) -> None:
        await self._until(lambda: not any(client.busy for client in self._clients))

    async def _until(self, reached: Callable[[], bool]) -> None:
        async with asyncio.timeout(_OPEN_S_MAX):
            while not reached():
                await asyncio.sleep(0.01)

    def _times(self) -> tuple[float, float, float, float]:
        return *relay_times(self._processes), time.perf_counter()

    def _close_window(self, started: tuple[float, float, float, float]) -> None:
        figures = self._figures
        figures.cpu_s, figures.first_cpu_s, figures.waited_s, figures.wall_s = (
            now - then for now, then in zip(self._times(), started, strict=True)
        )


def ports(job: Job) -> Iterator[int]:
    """Return the port of each connection."""
    return itertools.cycle([job.port] if job.second_port is None else [job.port, job.second_port])


def _numbered(job: Job) -> Callable[[], bytes]:
    """Return what makes the next request. Numbers go on from job to job, so that no prompt comes twice."""
    variants = itertools.cycle(
        request(job.size, variant=variant, tokens=job.tokens, gap_ms=job.gap_ms, stream=job.stream)
        for variant in range(_VARIANTS)
    )
    numbers = itertools.count(time.time_ns() // 1_000_000)

    def numbered() -> bytes:
        before, after = next(variants)
        return b"%s%0*d%s" % (before, NUMBER_BYTES, next(numbers) % 10**NUMBER_BYTES, after)

    return numbered


def _trusting(job: Job) -> ssl.SSLContext | None:
    """Return a client's context that trusts any certificate, if the job is over TLS."""
    if not job.tls:
        return None
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    return context


def _figures(job: Job) -> Figures:
    try:
        if job.kind == "hold":
            return hold(job, _numbered(job), _trusting(job))
        return uvloop.run(_Load(job).run())
    except OSError as error:  # nobody listens, or nothing came in time
        return Figures(bad=1, problem=f"load failed: {error!r}")


def main() -> None:
    gc.disable()  # a collection would look like a slow relay
    for line in sys.stdin:
        print(json.dumps(asdict(_figures(Job(**json.loads(line))))), flush=True)
        gc.collect()


if __name__ == "__main__":
    main()
