"""The bodies of the proxy's own small requests: pings, metrics, lists of models."""

from __future__ import annotations

from collections.abc import AsyncIterator
from time import monotonic

from gorgo.core.buffer_budget import BufferBudget

#: Bodies are cut here: SGLang's /metrics is about 100 kB.
FETCH_LIMIT_BYTES = 4 * 1024 * 1024
#: Up to here a body is not reserved: a full proxy probes its replicas all the same.
SMALL_FETCH_BYTES = 256 * 1024
#: The client that large bodies of all replicas count for.
FETCHES = "fetches of the proxy"


async def read_all(chunks: AsyncIterator[bytes], buffers: BufferBudget | None) -> bytes | None:
    """Return a body whole, `None` if it is too large or `buffers` has no space for it."""
    buffer = None if buffers is None else buffers.new_buffer(FETCHES, now=monotonic())
    parts: list[bytes] = []
    size = 0
    try:
        async for chunk in chunks:
            size += len(chunk)
            if size > FETCH_LIMIT_BYTES:
                return None
            # The parts and their join.
            if buffers is not None and buffer is not None and size > SMALL_FETCH_BYTES:
                may_grow = buffers.reserve(buffer, 2 * size, now=monotonic())
                if not may_grow:
                    return None
            parts.append(chunk)
        return b"".join(parts)
    finally:
        parts.clear()
        if buffers is not None and buffer is not None:
            buffers.close(buffer)
