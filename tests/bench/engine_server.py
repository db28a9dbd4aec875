"""CPU time of the simulated engine per million streamed tokens, with hundreds of streams open at once.

The engine runs in a process of its own, whose CPU time is what is measured; the load, in this process, is bare sockets
that only look for the end of each answer. Steps take 10 ms, as long as a decode iteration of a real engine, so that all
streams get one token a hundred times a second.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import resource
from functools import partial
from multiprocessing.connection import Connection
from typing import cast

import uvloop

from gorgo.apps.engine_server import run_engine
from gorgo.sim.profiles import EngineProfile

STREAMS = (64, 256)
RTTS_MS = (0.0, 95.0)
TOKENS = 128
ROUNDS = 8

PROFILE = EngineProfile(
    name="bench",
    prefill_base_s=0.001,
    prefill_tokens_per_s=1e9,
    prefill_kappa_s=0.0,
    chunk_tokens=100_000,
    decode_base_s=0.01,
    decode_per_request_s=0.0,
    decode_kv_s=0.0,
    kv_tokens=1_000_000,
    max_running_requests=1024,
)


def run() -> None:
    """Print CPU seconds per million tokens for each number of streams and distance."""
    print(f"simulated engine, {TOKENS} tokens a stream, 10 ms apart, {ROUNDS} rounds")
    print(f"{'streams':>7}  {'RTT ms':>6}  {'tokens':>9}  {'CPU s':>6}  {'CPU s per 1 M':>13}  {'of a core':>9}")
    for streams in STREAMS:
        for rtt_ms in RTTS_MS:
            _report(streams, rtt_ms)


def _report(streams: int, rtt_ms: float) -> None:
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=_engine, args=(theirs, rtt_ms))
    process.start()
    port = ours.recv()
    elapsed_s = uvloop.run(_load(port, streams))
    ours.send("stop")
    cpu_s = ours.recv()
    process.join()
    tokens = streams * TOKENS * ROUNDS
    share = cpu_s / elapsed_s
    print(f"{streams:>7}  {rtt_ms:>6.0f}  {tokens:>9,}  {cpu_s:>6.2f}  {cpu_s / tokens * 1e6:>13.1f}  {share:>9.0%}")


def _engine(pipe: Connection, rtt_ms: float) -> None:
    """The engine's process: says its port, serves until told to stop, says what it used meanwhile."""
    uvloop.run(_serve(pipe, rtt_ms))


async def _serve(pipe: Connection, rtt_ms: float) -> None:
    stop = asyncio.Event()
    asyncio.get_running_loop().add_reader(pipe.fileno(), stop.set)
    before: list[float] = []

    def ready(_: str, port: int) -> None:
        before.append(_cpu_s())
        pipe.send(port)

    await run_engine(
        name="bench",
        profile=PROFILE,
        rtt_ms=rtt_ms,
        jitter=0.02,
        seed=0,
        host="127.0.0.1",
        port=0,
        ready=ready,
        stop=stop,
    )
    pipe.send(_cpu_s() - before[0])


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


class _Client(asyncio.Protocol):
    """One connection that asks for one stream after the other."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self._left = ROUNDS
        self._tail = b""
        self._transport: asyncio.Transport | None = None
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transport does not derive from asyncio's class of that name.
        self._transport = cast(asyncio.Transport, transport)
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        tail = (self._tail + data)[-5:]
        self._tail = tail
        if tail == b"0\r\n\r\n":
            self._next()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.done.set_exception(exc or ConnectionError("the engine closed the connection"))

    def _next(self) -> None:
        assert self._transport is not None
        self._left -= 1
        if self._left:
            self._transport.write(self._request)
        else:
            self.done.set_result(None)
            self._transport.close()


async def _load(port: int, streams: int) -> float:
    loop = asyncio.get_running_loop()
    started_s = loop.time()
    clients = []
    for number in range(streams):
        _, client = await loop.create_connection(partial(_Client, _chat(number)), "127.0.0.1", port)
        clients.append(client)
    await asyncio.gather(*(client.done for client in clients))
    return loop.time() - started_s


def _chat(number: int) -> bytes:
    messages = [{"role": "user", "content": f"stream {number} of the benchmark, process {os.getpid()}"}]
    body = json.dumps({"messages": messages, "max_tokens": TOKENS, "stream": True}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: engine\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


if __name__ == "__main__":
    run()
