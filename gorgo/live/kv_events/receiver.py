"""The messages of one socket of ZeroMQ, for half the processor time of the package's own futures."""

from __future__ import annotations

import asyncio
from types import ModuleType
from typing import Any, Protocol

from gorgo.live.kv_events.turns import Arrivals, Turn

#: Looks at a socket without a message until the loop watches it again.
IDLE_POLLS = 5


class MessageTaker(Protocol):
    """Handles short messages at once, each in two steps of the event loop."""

    def take_message(self, frames: list[bytes]) -> bool:
        """Begin to handle a message; return false, without a change, for one that is not taken."""

    def finish_message(self) -> bool:
        """Handle the rest of the last message that was taken; return whether there was any."""


class Receiver:
    """The messages of one socket, read in turns of the event loop.

    A socket that is quiet is watched by the loop; while many messages come, `Arrivals` looks at it instead.

    Parameters
    ----------
    zmq:
        The package.
    socket:
        Stays with the caller, who receives nothing from it.
    arrivals:
        Looks at all sockets in use.
    turn:
        In its steps messages are read.
    taker:
        Handles the messages that it takes; `next_message` returns the others.
    """

    def __init__(self, zmq: ModuleType, socket: Any, arrivals: Arrivals, turn: Turn, *, taker: MessageTaker) -> None:
        self._socket = zmq.Socket.shadow(socket.underlying)
        self._events, self._readable = zmq.EVENTS, zmq.POLLIN
        self._nowait, self._none_yet, self._error = zmq.NOBLOCK, zmq.Again, zmq.ZMQError
        self._descriptor: int = self._socket.FD
        self._arrivals = arrivals
        self._turn = turn
        self._taker = taker
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[list[bytes]] | None = None
        self._is_watched = self._is_polled = self._is_queued = self._is_closed = False
        self._idle_polls = 0

    async def next_message(self) -> list[bytes]:
        """Return the frames of the next message that was not taken. Raises `zmq.ZMQError`."""
        self._waiter = self._loop.create_future()
        self._read_soon()
        return await self._waiter

    def close(self) -> None:
        """Stop watching the socket."""
        self._is_closed = True
        self._unwatch()

    def _read_soon(self) -> None:
        if not self._is_queued:
            self._is_queued = True
            self._turn.add(self._read)

    def _read(self) -> bool:
        """Read a message, or handle the rest of the last one; return whether there may be another one."""
        self._is_queued = False
        if self._is_closed or self._waiter is None or self._waiter.done():
            return False
        try:
            if self._taker.finish_message():
                self._is_queued = True
                return True
            frames: list[bytes] = self._socket.recv_multipart(self._nowait)
        except self._none_yet:
            if not self._is_polled:
                self._watch()
            return False
        except self._error as error:
            self._waiter.set_exception(error)
            return False
        except Exception as error:  # noqa: BLE001 - the taker's
            self._waiter.set_exception(error)
            return False
        try:
            self._is_queued = self._taker.take_message(frames)
        except Exception as error:  # noqa: BLE001 - likewise
            self._waiter.set_exception(error)
            return False
        if not self._is_queued:
            self._waiter.set_result(frames)
        return self._is_queued

    def _watch(self) -> None:
        """Watch the descriptor. It reports the next change after an answer that there is no message."""
        if not self._is_watched:
            self._is_watched = True
            self._loop.add_reader(self._descriptor, self._on_change)

    def _unwatch(self) -> None:
        if self._is_watched:
            self._is_watched = False
            self._loop.remove_reader(self._descriptor)

    def _on_change(self) -> None:
        # The question alone ends that the descriptor is readable, which would occupy the loop.
        if not self._has_message():
            return
        if self._arrivals.may_wake():
            self._read_soon()
            return
        self._unwatch()
        self._is_polled, self._idle_polls = True, 0
        self._arrivals.add(self._poll)

    def _poll(self) -> bool:
        """Read what has come; return whether to look again."""
        if self._is_closed:
            return False
        if self._is_queued or self._waiter is None or self._waiter.done():
            return True  # the last message is being handled
        if self._has_message():
            self._idle_polls = 0
            self._read_soon()
            return True
        self._idle_polls += 1
        if self._idle_polls < IDLE_POLLS:
            return True
        self._is_polled = False
        self._read_soon()  # which watches it
        return False

    def _has_message(self) -> bool:
        return bool(self._socket.getsockopt(self._events) & self._readable)
