"""Processor time of one call of the endpoint picker, and calls a second that one core would carry.

A server in a process of its own has calls as Envoy makes them: 32 at once on one connection. First alone, each message
with an answer of 200 bytes, then with the picker behind it: 64 replicas, gorgo-ms. The
client is not counted.
"""

from __future__ import annotations

import asyncio
import gc
import time
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection as Pipe
from statistics import median
from typing import Any

import uvloop

from gorgo.config.model import PickerTlsConfig
from gorgo.core.limits import BufferBudget
from gorgo.live.logs import set_up_logs
from gorgo.picker.call import PickerCall
from gorgo.picker.transport.http2.server import Http2Server
from gorgo.picker.transport.services import Health, Services, services
from gorgo.picker.transport.streams import CallHandlers, Output, TransportLimits, nothing_open
from tests.bench import picker_call
from tests.bench.picker_client import CallClient
from tests.picker.virtual import BUFFERED, body_message, headers_message

ROUNDS = 3
CALLS = 1000
#: Calls at once.
WIDTH = 32
ANSWER = bytes(200)


@dataclass(frozen=True)
class Workload:
    """Messages of one call, each sent after the answer to the one before."""

    name: str
    messages: tuple[bytes, ...]
    with_picker: bool = False


def workloads() -> list[Workload]:
    head = headers_message("request_headers", *picker_call.HEADERS, mode=BUFFERED).SerializeToString()
    body = body_message("request_body", picker_call.BODY).SerializeToString()
    large = body_message("request_body", b"x" * 48_000).SerializeToString()
    chunk = body_message("response_body", b"x" * 130, end=False).SerializeToString()
    return [
        Workload(f"2 messages, a body of {len(picker_call.BODY)} bytes", (head, body)),
        Workload("2 messages, a body of 48,000 bytes", (head, large)),
        Workload("22 messages: a stream in pieces", (head, body, *[chunk] * 20)),
        Workload("2 messages with the picker", (head, body), with_picker=True),
    ]


def run() -> None:
    """Print medians of rounds."""
    set_up_logs(level="warning")
    print(f"us of processor time a call and calls/s of one core, median (least us) of {ROUNDS} rounds of {CALLS} calls")
    for workload in workloads():
        us = [_measure(workload) for _ in range(ROUNDS)]
        shown = f"{median(us):.0f} ({min(us):.0f}), {1e6 / median(us):,.0f}/s"
        print(f"{workload.name:<38}{shown:>24}")


def _measure(workload: Workload) -> float:
    """Return the server's us a call."""
    spawn = get_context("spawn")
    ours, theirs = spawn.Pipe()
    server = spawn.Process(target=_serve_process, args=(workload.with_picker, theirs))
    server.start()
    try:
        port = ours.recv()
        return uvloop.run(_drive(port, workload.messages, ours)) * 1e6 / CALLS
    finally:
        ours.send("end")
        server.join(10)


async def _drive(port: int, messages: tuple[bytes, ...], server: Any) -> float:
    """Return the server's s of `CALLS` calls, after some to warm up."""
    loop = asyncio.get_running_loop()
    _, client = await loop.create_connection(lambda: CallClient(messages), "127.0.0.1", port)
    await client.calls(WIDTH * 4, width=WIDTH)
    server.send("time")
    before_s = server.recv()
    await client.calls(CALLS, width=WIDTH)
    server.send("time")
    spent_s: float = server.recv() - before_s
    client.close()
    return spent_s


# -- the server's process


def _serve_process(with_picker: bool, pipe: Pipe) -> None:
    set_up_logs(level="error")
    uvloop.run(_serve(with_picker, pipe))


async def _serve(with_picker: bool, pipe: Pipe) -> None:
    limits = TransportLimits(1_000_000, 10_000)
    server = Http2Server(_with_picker() if with_picker else _alone(), limits, BufferBudget(1 << 28))
    _, port = server.bind("127.0.0.1:0", PickerTlsConfig())
    closing = asyncio.Event()

    def on_order() -> None:
        if pipe.recv() == "end":
            closing.set()
        else:
            pipe.send(time.process_time())

    asyncio.get_running_loop().add_reader(pipe.fileno(), on_order)
    gc.freeze()
    task = asyncio.create_task(server.serve_calls(closing))
    await asyncio.sleep(0.05)
    pipe.send(port)
    await task


def _alone() -> Services:
    def process(output: Output) -> CallHandlers:
        return CallHandlers(lambda _: output.send_message(ANSWER), nothing_open)

    return services(process, lambda _: None, Health(lambda: True))


def _with_picker() -> Services:
    state = picker_call.make_state()

    def process(output: Output) -> CallHandlers:
        call = PickerCall(state, output)
        return CallHandlers(call.feed, call.closed)

    return services(process, lambda _: None, Health(lambda: True))
