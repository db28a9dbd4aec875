"""CPU time of the simulated engine per million streamed tokens, with hundreds of streams open at once.

The engine runs in a process of its own, whose CPU time is what is measured; the load, in this process, is bare sockets
that only look for the end of each answer. Steps take 10 ms, as long as a decode iteration of a real engine, so that all
streams get one token a hundred times a second.
"""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import resource
from functools import partial
from multiprocessing.connection import Connection
from typing import cast

import uvloop

from gorgo.lab.engine_server import run_engine
from gorgo.lab.sim.engine.profiles import EngineProfile

STREAMS = (64, 256)
RTTS_MS = (0.0, 95.0)
TOKENS = 128
ROUNDS = 8

#: For the cost of a long prompt: as many tokens as the longest ones of the GORGO paper.
PROMPT_TOKENS = 24_000
PROMPT_STREAMS = 16
PROMPT_ROUNDS = 20

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
    """Print CPU seconds per million tokens for streams and distances, and milliseconds per long prompt."""
    print(f"simulated engine, {TOKENS} tokens a stream, 10 ms apart, {ROUNDS} rounds")
    print(f"{'streams':>7}  {'RTT ms':>6}  {'tokens':>9}  {'CPU s':>6}  {'CPU s per 1 M':>13}  {'of a core':>9}")
    for streams in STREAMS:
        for rtt_ms in RTTS_MS:
            cpu_s, elapsed_s = _measure([_chat(number, TOKENS) for number in range(streams)], ROUNDS, rtt_ms)
            tokens = streams * TOKENS * ROUNDS
            shown = f"{cpu_s:>6.2f}  {cpu_s / tokens * 1e6:>13.1f}  {cpu_s / elapsed_s:>9.0%}"
            print(f"{streams:>7}  {rtt_ms:>6.0f}  {tokens:>9,}  {shown}")
    asked = [_chat(number, 1, PROMPT_TOKENS) for number in range(PROMPT_STREAMS)]
    cpu_s, _ = _measure(asked, PROMPT_ROUNDS, 0.0)
    each_ms = cpu_s / (PROMPT_STREAMS * PROMPT_ROUNDS) * 1e3
    print(f"a prompt of {PROMPT_TOKENS:,} tokens with one token of output: {each_ms:.2f} ms of CPU")


def _measure(requests: list[bytes], rounds: int, rtt_ms: float) -> tuple[float, float]:
    """CPU and wall seconds of an engine that answers each request `rounds` times, all of them at once."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_engine, args=(theirs, rtt_ms))
    process.start()
    port: int = ours.recv()
    elapsed_s = uvloop.run(_load(port, requests, rounds))
    ours.send("stop")
    cpu_s: float = ours.recv()
    process.join()
    return cpu_s, elapsed_s


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

    def __init__(self, request: bytes, rounds: int) -> None:
        self._request = request
        self._left = rounds
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


async def _load(port: int, requests: list[bytes], rounds: int) -> float:
    loop = asyncio.get_running_loop()
    started_s = loop.time()
    clients = []
    for request in requests:
        _, client = await loop.create_connection(partial(_Client, request, rounds), "127.0.0.1", port)
        clients.append(client)
    await asyncio.gather(*(client.done for client in clients))
    return loop.time() - started_s


def _chat(number: int, output_tokens: int, prompt_tokens: int = 10) -> bytes:
    text = f"stream {number} of the benchmark. ".ljust(prompt_tokens * 4, "x")
    messages = [{"role": "user", "content": text}]
    body = json.dumps({"messages": messages, "max_tokens": output_tokens, "stream": True}).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: engine\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


if __name__ == "__main__":
    run()
