"""One call as a transport and a service see it: serialized messages in both directions, and an end with a status.

Owns the seam between a transport and a service, and the bounds of connections, which every transport observes.

Theory of operation. A transport calls `ServedCall.feed` with each message and `ServedCall.close` at the end of its
input, whatever the reason. A service answers by `Output`, at once or later. No method waits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol, Self

from gorgo.config.model import LimitsConfig
from gorgo.core.record import record
from gorgo.live.logs import log, log_failure
from gorgo.picker.protocol.messages import CallOutput, ProtocolError

#: Characters of a status message: it is a header, and Envoy bounds those.
_STATUS_CHARS = 500


class Status(IntEnum):
    """Statuses of gRPC that the picker sends."""

    OK = 0
    INVALID_ARGUMENT = 3
    NOT_FOUND = 5
    RESOURCE_EXHAUSTED = 8
    UNIMPLEMENTED = 12
    INTERNAL = 13


class Output(CallOutput, Protocol):
    """The answers of one call. Each method may be called after the end, and does nothing then."""

    def fail_call(self, status: Status, text: str) -> None:
        """End the call with another status."""
        ...


@record
class CallHandlers:
    """The service's side of one call.

    `take_message` raises `ProtocolError` for one that the protocol does not allow; `on_end` is called once.
    """

    take_message: Callable[[bytes], None]
    on_end: Callable[[], None]


Opener = Callable[[Output], CallHandlers]


class ServedCall:
    """One call of a service: errors become statuses, and the service hears of its end once."""

    __slots__ = ("_handlers", "_is_closed", "_method", "_output")

    def __init__(self, method: str, opener: Opener, output: Output) -> None:
        self._method = method
        self._output = output
        self._is_closed = False
        self._handlers = opener(output)

    def feed(self, message: bytes) -> None:
        """Pass a message on; one after the end is dropped."""
        if self._is_closed:
            return
        try:
            self._handlers.take_message(message)
        except ProtocolError as error:
            log("call_refused", level=logging.WARNING, method=self._method, error=str(error))
            self._fail(Status.INVALID_ARGUMENT, str(error))
        except Exception as failure:  # noqa: BLE001 - one message must not end the connection of all others
            log_failure("call_failed", failure)
            self._fail(Status.INTERNAL, type(failure).__name__)

    def close(self) -> None:
        """Tell the service that the call has ended."""
        if not self._is_closed:
            self._is_closed = True
            self._handlers.on_end()

    def release(self) -> None:
        """End the call with OK before the process stops: Envoy carries on with the exchange by itself."""
        self.close()
        self._output.end_call()

    def _fail(self, status: Status, text: str) -> None:
        self.close()
        self._output.fail_call(status, text[:_STATUS_CHARS])


def nothing_open() -> None:
    """Do nothing at the end of a call: its service has no state of it."""


# Bounds of the picker's connections, and why each is what it is.


#: A message beside the body that it carries: heads of 64 KiB, attributes and metadata.
ENVELOPE_BYTES = 256 * 1024
#: Calls of one exchange at a time: the decision, the first token.
CALLS_PER_EXCHANGE = 2
#: Envoy's workers, each with streams of the access log and of health checks.
OTHER_CALLS = 256
#: A connection without any frame for so long is asked for a sign of life, s.
KEEPALIVE_S = 30.0
#: Without an answer after so long it is closed, and its calls have ended, s.
KEEPALIVE_ANSWER_S = 10.0
#: Connections at a time; each of Envoy's workers has a few.
MAX_CONNECTIONS = 1024
#: Time for the ends of calls to reach Envoy, s.
CLOSE_S = 1.0
#: From an opened connection to its settings, s; and of a TLS handshake.
HANDSHAKE_S = 10.0


@dataclass(frozen=True, slots=True)
class TransportLimits:
    """Bounds of one server.

    Parameters
    ----------
    message_bytes:
        Of one message: a whole body in Envoy's buffered mode.
    calls:
        Open at once on one connection; Envoy opens another connection for more.
    """

    message_bytes: int
    calls: int

    @classmethod
    def of(cls, limits: LimitsConfig) -> Self:
        """Return the bounds for a configuration: an exchange per client connection that `gorgo serve` would accept."""
        return cls(limits.max_body_bytes + ENVELOPE_BYTES, CALLS_PER_EXCHANGE * limits.max_connections + OTHER_CALLS)
