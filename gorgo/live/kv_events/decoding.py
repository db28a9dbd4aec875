"""Decoding of large messages, in a process beside the event loop.

A thread would not do: decoding a field of a million tokens holds Python's lock for tens of milliseconds.
"""

from __future__ import annotations

import asyncio
import pickle
from asyncio.subprocess import Process
from collections.abc import AsyncGenerator
from contextlib import aclosing

from gorgo.core.messages.kv_events import KvEventBatch
from gorgo.live.helper_process import end_helper, start_helper
from gorgo.live.kv_events.worker import LENGTH

#: Longest message that the event loop decodes itself, in about a millisecond: the events of a prompt of 10,000 tokens.
LOOP_BYTES = 64 * 1024
#: For one message, a start of the process included; the largest takes some tenths of a second.
TIMEOUT_S = 30.0
#: Added to the proxy's own: where processors are few, the event loop goes first.
NICENESS = 10


class KvDecoder:
    """Decodes the large messages of all replicas; the process starts with the first one."""

    def __init__(self) -> None:
        self._process: Process | None = None
        self._lock = asyncio.Lock()

    async def decode(self, message: bytes) -> AsyncGenerator[KvEventBatch, None]:
        """Yield the events of a message in pieces. Raises `ValueError`, also if the process failed."""
        async with self._lock, aclosing(self._exchange(message)) as answers:
            async for answer in answers:
                yield answer

    async def aclose(self) -> None:
        """End the process; the next large message starts another."""
        process, self._process = self._process, None
        if process is not None:
            await end_helper(process)

    async def _exchange(self, message: bytes) -> AsyncGenerator[KvEventBatch, None]:
        whole = False
        try:
            async with asyncio.timeout(TIMEOUT_S):
                if self._process is None:
                    self._process = await start_helper("gorgo.live.kv_events.worker", niceness=NICENESS)
                stdin, stdout = self._process.stdin, self._process.stdout
                assert stdin is not None
                assert stdout is not None
                stdin.write(LENGTH.pack(len(message)) + message)
                await stdin.drain()
                while size := LENGTH.unpack(await stdout.readexactly(LENGTH.size))[0]:
                    answer = pickle.loads(await stdout.readexactly(size))
                    if isinstance(answer, str):
                        await stdout.readexactly(LENGTH.size)
                        whole = True
                        raise ValueError(answer)
                    yield answer
            whole = True
        except (OSError, EOFError) as error:  # a timeout is an OSError
            raise ValueError(f"the process that decodes it failed: {type(error).__name__}") from None
        finally:
            if not whole:
                await self.aclose()
