"""Decoding of messages, large ones beside the event loop."""

from __future__ import annotations

import asyncio

from gorgo.core.messages.kv_events import KvEventBatch
from gorgo.engines.kv_events import decode_message

#: Longest message that the event loop decodes itself, in about 2 ms: the events of a prompt of 50,000 tokens.
LOOP_BYTES = 256 * 1024


async def decode(payload: bytes) -> KvEventBatch:
    """Return the events of a message. Raises `ValueError`."""
    if len(payload) <= LOOP_BYTES:
        return decode_message(payload)
    return await asyncio.to_thread(decode_message, payload)
