"""The patience with a client that does not read what was written to it."""

from __future__ import annotations

import asyncio

#: A client that reads nothing of its response for this long is disconnected; proxies before it idle no longer, s.
LINGER_S = 30.0


class LingerTimeout:
    """Aborts a connection whose client reads nothing of its response; an orderly end would wait for it for ever."""

    def __init__(self, loop: asyncio.AbstractEventLoop, transport: asyncio.WriteTransport) -> None:
        self._loop = loop
        self._transport = transport
        self._left = unsent_bytes(transport)
        self._timer = loop.call_later(LINGER_S, self._check)

    def stop(self) -> None:
        self._timer.cancel()

    def _check(self) -> None:
        before, self._left = self._left, unsent_bytes(self._transport)
        if self._left >= before:
            self._transport.abort()
        else:
            self._timer = self._loop.call_later(LINGER_S, self._check)


def unsent_bytes(transport: asyncio.WriteTransport) -> int:
    """Return the size of the write buffer; 0 for a closed TLS transport of uvloop, which has no buffer."""
    try:
        return transport.get_write_buffer_size()
    except AttributeError:
        return 0
