"""A peer that listens and never says a word."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager


@contextmanager
def silent_port(*, accepts: bool) -> Iterator[int]:
    """A port that never says a word; one that does not accept drops the first packet of a handshake."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=64 if accepts else 0))
        port: int = listener.getsockname()[1]
        for _ in range(0 if accepts else 4):
            # The kernel keeps one that nobody accepts; the others wait for it as the proxy will.
            filler = stack.enter_context(socket.socket())
            filler.setblocking(False)
            filler.connect_ex(("127.0.0.1", port))
        yield port
