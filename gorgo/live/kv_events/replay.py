"""One replay: the messages that a publisher retains, from a number on."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from gorgo.live.kv_events.frames import is_end, read_message, replay_request
from gorgo.live.kv_events.sockets import KvSockets

#: Longest replay, and the longest pause in one: 10,000 messages take seconds.
REPLAY_TIMEOUT_S = 120.0
IDLE_TIMEOUT_S = 2.0


async def replay(sockets: KvSockets, endpoint: str, start: int) -> AsyncGenerator[tuple[int, bytes], None]:
    """Yield the messages from number `start` on. Raises `TimeoutError`, and `zmq.ZMQError` for a bad address."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + REPLAY_TIMEOUT_S
    socket = sockets.request(endpoint)
    try:
        # The request waits in the socket for the connection; without an end where ZeroMQ gave the connection up before.
        async with asyncio.timeout(IDLE_TIMEOUT_S):
            await socket.send_multipart(replay_request(start))
        while True:
            async with asyncio.timeout_at(min(deadline, loop.time() + IDLE_TIMEOUT_S)):
                frames = await socket.recv_multipart()
            if is_end(frames):
                return
            message = read_message(frames)
            if message is not None:
                yield message
    finally:
        socket.close(linger=0)
