"""Sockets of ZeroMQ with their bounds."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from gorgo.engines.kv_events import MAX_MESSAGE_BYTES
from gorgo.engines.kv_sources import KvEventSource
from gorgo.live.kv_events.turns import Arrivals

#: Pause before a broken connection is tried again; it doubles up to the second one.
RETRY_S = 1.0
MAX_RETRY_S = 5.0
#: A peer that is silent for so long is not there: a firewall may drop a connection without an end.
HEARTBEAT_S = 5.0
HEARTBEAT_TIMEOUT_S = 10.0
#: Looks at a socket without a message until the loop watches it again.
IDLE_POLLS = 5
#: Messages that wait in a socket; the publisher drops further ones, which a replay repairs. Each has a few kilobytes.
RECEIVE_QUEUE = 1000


class KvSockets:
    """The sockets of one proxy, made when the first one is needed.

    Parameters
    ----------
    zmq:
        The package.
    """

    def __init__(self, zmq: ModuleType) -> None:
        self.zmq = zmq
        self._context: Any = zmq.asyncio.Context()
        self._arrivals = Arrivals()

    @contextmanager
    def subscribed(self, source: KvEventSource) -> Iterator[tuple[Receiver, Any]]:
        """Return a receiver of the events of `source`, and a socket that reports its connections.

        Raises `zmq.ZMQError`.
        """
        zmq = self.zmq
        found = self._socket(zmq.SUB)
        found.setsockopt(zmq.SUBSCRIBE, source.topic.encode())
        # Before the connection, which would else not be reported.
        monitor = found.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        receiver = Receiver(zmq, found, self._arrivals)
        try:
            (found.bind if source.mode == "bind" else found.connect)(source.endpoint)
            yield receiver, monitor
        finally:
            receiver.close()
            found.disable_monitor()
            monitor.close(linger=0)
            found.close(linger=0)

    def request(self, endpoint: str) -> Any:
        """Return a socket for the request of one replay. Raises `zmq.ZMQError`."""
        found = self._socket(self.zmq.DEALER)
        try:
            found.connect(endpoint)
        except self.zmq.ZMQError:
            found.close(linger=0)
            raise
        return found

    def close(self) -> None:
        self._context.destroy(linger=0)

    def _socket(self, kind: int) -> Any:
        zmq = self.zmq
        found = self._context.socket(kind)
        options = {
            zmq.LINGER: 0,
            zmq.IPV6: 1,
            zmq.MAXMSGSIZE: MAX_MESSAGE_BYTES,
            zmq.RCVHWM: RECEIVE_QUEUE,
            zmq.RECONNECT_IVL: int(RETRY_S * 1e3),
            zmq.RECONNECT_IVL_MAX: int(MAX_RETRY_S * 1e3),
            zmq.HEARTBEAT_IVL: int(HEARTBEAT_S * 1e3),
            zmq.HEARTBEAT_TIMEOUT: int(HEARTBEAT_TIMEOUT_S * 1e3),
        }
        for option, value in options.items():
            found.setsockopt(option, value)
        return found


class Receiver:
    """The messages of one socket, for half the processor time of the package's own futures.

    A socket that is quiet is watched by the loop; while messages come, `Arrivals` looks at it instead.

    Parameters
    ----------
    zmq:
        The package.
    socket:
        Stays with the caller, who receives nothing from it.
    arrivals:
        Looks at all sockets in use.
    """

    def __init__(self, zmq: ModuleType, socket: Any, arrivals: Arrivals) -> None:
        self._socket = zmq.Socket.shadow(socket.underlying)
        self._events, self._readable = zmq.EVENTS, zmq.POLLIN
        self._nowait, self._none_yet = zmq.NOBLOCK, zmq.Again
        self._descriptor: int = self._socket.FD
        self._arrivals = arrivals
        self._loop = asyncio.get_running_loop()
        self._waiter: asyncio.Future[None] | None = None
        self._is_watched = self._is_polled = self._is_closed = False
        self._idle_polls = 0

    async def receive(self) -> list[bytes]:
        """Return the frames of the next message. Raises `zmq.ZMQError`."""
        while True:
            try:
                frames: list[bytes] = self._socket.recv_multipart(self._nowait)
            except self._none_yet:
                self._waiter = self._loop.create_future()
                if not self._is_polled:
                    self._watch()
                await self._waiter
            else:
                return frames

    def close(self) -> None:
        """Stop watching the socket."""
        self._is_closed = True
        self._unwatch()

    def _watch(self) -> None:
        """Watch the descriptor. It reports the next change after an answer that there is no message."""
        if self._has_message():
            self._begin_polls()
        elif not self._is_watched:
            self._is_watched = True
            self._loop.add_reader(self._descriptor, self._on_change)

    def _unwatch(self) -> None:
        if self._is_watched:
            self._is_watched = False
            self._loop.remove_reader(self._descriptor)

    def _on_change(self) -> None:
        # The question alone ends that the descriptor is readable, which would occupy the loop.
        if self._has_message():
            self._unwatch()
            self._begin_polls()

    def _begin_polls(self) -> None:
        self._is_polled, self._idle_polls = True, 0
        self._arrivals.add(self._poll)

    def _poll(self) -> bool:
        """Wake the caller if there is a message; return whether to look again."""
        if self._is_closed:
            return False
        if self._waiter is None or self._waiter.done():
            return True  # the last message is being handled
        if self._has_message():
            self._idle_polls = 0
            self._waiter.set_result(None)
            return True
        self._idle_polls += 1
        if self._idle_polls < IDLE_POLLS:
            return True
        self._is_polled = False
        self._watch()
        return False

    def _has_message(self) -> bool:
        return bool(self._socket.getsockopt(self._events) & self._readable)
