"""Sockets of ZeroMQ for replays, with their bounds. See `connections` for the events themselves."""

from __future__ import annotations

from types import ModuleType
from typing import Any

from gorgo.engines.kv_events import MAX_MESSAGE_BYTES
from gorgo.live.kv_events.connections import HEARTBEAT_S, HEARTBEAT_TIMEOUT_S, MAX_RETRY_S, RETRY_S

#: Messages of a replay that wait; with more nothing is read. Each has a few kilobytes.
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
