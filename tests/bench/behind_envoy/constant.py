"""A picker that decides nothing: it answers each call of Envoy with the same replica, on the picker's own transport.

What no picker in this form of process can be cheaper than: `python -m tests.bench.behind_envoy.constant PORT ADDRESS`.
"""

from __future__ import annotations

import asyncio
import gc
import sys

import uvloop

from gorgo.config.model import PickerTlsConfig
from gorgo.core.limits import BufferBudget
from gorgo.live.logs import set_up_logs
from gorgo.picker.protocol.answers import UNCHANGED, EndpointChoice, chosen
from gorgo.picker.protocol.messages import read_message
from gorgo.picker.transport.server import Http2Server
from gorgo.picker.transport.services import CallHandlers, Health, Output, TransportLimits, nothing_open, services


async def _serve(port: int, address: str) -> None:
    choice = chosen("request_body", EndpointChoice(address, "constant-1"), with_body=True)

    def process(output: Output) -> CallHandlers:
        def take(message: bytes) -> None:
            kind = read_message(message).WhichOneof("request")
            if kind == "request_headers":
                output.send_message(UNCHANGED["request_headers"])
            elif kind == "request_body":
                output.send_message(choice)
            else:
                output.end_call()  # of first tokens

        return CallHandlers(take, nothing_open)

    limits = TransportLimits(1_000_000, 10_000)
    server = Http2Server(services(process, lambda _: None, Health(lambda: True)), limits, BufferBudget(1 << 28))
    server.bind(f"127.0.0.1:{port}", PickerTlsConfig())
    gc.freeze()
    task = asyncio.create_task(server.serve_calls(asyncio.Event()))
    print("listening", flush=True)
    await task


if __name__ == "__main__":
    set_up_logs(level="error")
    uvloop.run(_serve(int(sys.argv[1]), sys.argv[2]))
