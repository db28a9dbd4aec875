"""Sockets of ZeroMQ with their bounds."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from gorgo.engines.kv_events import MAX_MESSAGE_BYTES
from gorgo.engines.kv_sources import KvEventSource
from gorgo.errors import MissingExtra
from gorgo.live.extras import EVENTS
from gorgo.live.kv_events.receiver import MessageTaker, Receiver
from gorgo.live.kv_events.turns import Arrivals, Turn

#: Pause before a broken connection is tried again; it doubles up to the second one.
RETRY_S = 1.0
MAX_RETRY_S = 5.0
#: A peer that is silent for so long is not there: a firewall may drop a connection without an end.
HEARTBEAT_S = 5.0
HEARTBEAT_TIMEOUT_S = 10.0
#: Messages that wait in a socket; the publisher drops further ones, which a replay repairs. Each has a few kilobytes.
RECEIVE_QUEUE = 1000


def import_zmq() -> ModuleType:
    """Return the package with its asyncio part. Raises `MissingExtra`."""
    try:
        import zmq
        import zmq.asyncio
        import zmq.utils.monitor
    except ImportError as error:
        raise MissingExtra(EVENTS.missing) from error
    module: ModuleType = zmq
    return module


class KvSockets:
    """The sockets of one proxy, made when the first one is needed.

    Parameters
    ----------
    zmq:
        The package.
    turn:
        As in `Receiver`.
    """

    def __init__(self, zmq: ModuleType, turn: Turn) -> None:
        self.zmq = zmq
        self._turn = turn
        self._context: Any = zmq.asyncio.Context()
        self._arrivals = Arrivals()

    @contextmanager
    def subscribed(self, source: KvEventSource, *, taker: MessageTaker) -> Iterator[tuple[Receiver, Any]]:
        """Return a receiver of the events of `source`, and a socket that reports its connections.

        Raises `zmq.ZMQError`.
        """
        zmq = self.zmq
        found = self._socket(zmq.SUB)
        found.setsockopt(zmq.SUBSCRIBE, source.topic.encode())
        # Before the connection, which would else not be reported.
        monitor = found.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        receiver = Receiver(zmq, found, self._arrivals, self._turn, taker=taker)
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
