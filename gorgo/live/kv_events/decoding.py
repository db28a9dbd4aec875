"""Decoding of large messages, in a process beside the event loop.

A thread would not do: decoding a field of a million tokens holds Python's lock for tens of milliseconds.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from gorgo.core.messages.kv_events import KvEventBatch
from gorgo.live.helper_process import HelperFailed, HelperProcess

#: Longest message that the event loop decodes itself, in about a millisecond: the events of a prompt of 10,000 tokens.
LOOP_BYTES = 64 * 1024
#: For one answer, a start of the process included; the largest message takes some tenths of a second.
TIMEOUT_S = 30.0
#: Added to the proxy's own: where processors are few, the event loop goes first.
NICENESS = 10


class KvDecoder:
    """Decodes the large messages of all replicas; the process starts with the first one."""

    def __init__(self) -> None:
        self._helper = HelperProcess("gorgo.live.kv_events.worker", niceness=NICENESS, timeout_s=TIMEOUT_S)

    async def decode(self, message: bytes) -> AsyncGenerator[KvEventBatch, None]:
        """Yield the events of a message in pieces. Raises `ValueError`, also if two processes failed at it."""
        refusal: str | None = None
        try:
            async with aclosing(self._helper.answers(message)) as answers:
                async for answer in answers:
                    if isinstance(answer, str):
                        refusal = answer
                    else:
                        yield answer
        except HelperFailed as failure:
            raise ValueError(f"the process that decodes it {failure}") from None
        if refusal is not None:
            raise ValueError(refusal)

    async def aclose(self) -> None:
        """End the process."""
        await self._helper.aclose()
