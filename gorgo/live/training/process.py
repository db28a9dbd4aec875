"""The process of `worker` as the proxy has it: outcomes in, replies out, one at a time."""

from __future__ import annotations

import asyncio
import pickle
from asyncio.subprocess import Process

from gorgo.core.training.outcomes import TrainingRows
from gorgo.live.helper_process import end_helper, start_helper
from gorgo.live.training.messages import LENGTH, Reply, Settings, encode

#: Time for one round; the largest takes tens of seconds on a core of its own.
ROUND_TIMEOUT_S = 900.0
#: Added to the proxy's own: where processors are few, the event loop goes first.
NICENESS = 19
_PIECE_BYTES = 64 * 1024


class TrainingProcess:
    """One process. After a failure it has ended, and another one is needed."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._process: Process | None = None

    @property
    def pid(self) -> int | None:
        """Return its id; `None` unless it runs."""
        return None if self._process is None else self._process.pid

    async def train(self, rows: TrainingRows) -> Reply:
        """Pass outcomes and return the reply; the first call starts the process.

        Raises an error if the process failed, as `OSError` or `EOFError`, and ends it then; so does a cancellation.
        """
        whole = False
        try:
            async with asyncio.timeout(ROUND_TIMEOUT_S):
                if self._process is None:
                    self._process = await start_helper("gorgo.live.training.worker", niceness=NICENESS)
                    await _send(self._process, encode(self._settings))
                reply = await _exchange(self._process, rows)
            whole = True
            return reply
        except (EOFError, ConnectionError):
            raise EOFError("the training process ended") from None
        finally:
            if not whole:
                await self.aclose()

    async def aclose(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            await end_helper(process)


async def _exchange(process: Process, rows: TrainingRows) -> Reply:
    assert process.stdout is not None
    await _send(process, encode(rows))
    (size,) = LENGTH.unpack(await process.stdout.readexactly(LENGTH.size))
    reply: Reply = pickle.loads(await process.stdout.readexactly(size))
    return reply


async def _send(process: Process, data: bytes) -> None:
    """Write in pieces, so that no more than a pipe's buffer waits in this process."""
    assert process.stdin is not None
    pieces = memoryview(data)
    for start in range(0, len(data), _PIECE_BYTES):
        process.stdin.write(bytes(pieces[start : start + _PIECE_BYTES]))
        await process.stdin.drain()
