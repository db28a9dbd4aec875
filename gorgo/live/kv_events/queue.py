"""Live messages that wait for a replay."""

from __future__ import annotations

from collections import deque

#: As many as engines retain, and a minute of a busy engine's bytes. Beyond, the newest are dropped: a further replay
#: has them.
MAX_MESSAGES = 10_000
MAX_BYTES = 64 * 1024 * 1024


class MessageQueue:
    """Numbered messages in their order, bounded in number and bytes.

    Example
    -------
    >>> queue = MessageQueue()
    >>> queue.add(7, b"first"), queue.pop(), bool(queue)
    (None, (7, b'first'), False)
    """

    def __init__(self) -> None:
        self._messages: deque[tuple[int, bytes]] = deque()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._messages)

    def add(self, number: int, payload: bytes) -> None:
        """Append a message, unless the queue is full."""
        if len(self._messages) < MAX_MESSAGES and self._bytes + len(payload) <= MAX_BYTES:
            self._messages.append((number, payload))
            self._bytes += len(payload)

    def pop(self) -> tuple[int, bytes]:
        """Remove and return the oldest message."""
        number, payload = self._messages.popleft()
        self._bytes -= len(payload)
        return number, payload

    def put_back(self, number: int, payload: bytes) -> None:
        """Undo `pop`."""
        self._messages.appendleft((number, payload))
        self._bytes += len(payload)

    def drop_all(self) -> None:
        self._messages.clear()
        self._bytes = 0
