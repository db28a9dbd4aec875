"""The load generator, a process of its own: for each job on standard input one line of figures on standard output.

Reads the relay's CPU time and memory itself, at the instants at which it starts and stops to count, so that the figures
of a window belong to the requests and events of that window.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import random
import ssl
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import cast

import uvloop

from tests.bench.relay.measure import process_tree, relay_times
from tests.bench.relay.scenarios import Figures, Job
from tests.bench.relay.streams import hold
from tests.bench.relay.wire import NUMBER_BYTES, ResponseReader, request

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
                lambda: _Client(self._done, self._lost), "127.0.0.1", self._job.port, ssl=self._context
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
