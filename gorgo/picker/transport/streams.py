"""One call as a transport and a service see it: serialized messages in both directions, and an end with a status.

Theory of operation. A transport calls `ServedCall.feed` with each message and `ServedCall.close` at the end of its
input, whatever the reason. A service answers by `Output`, at once or later. No method waits.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from enum import IntEnum
from typing import Protocol

from gorgo.core.record import record
from gorgo.live.logs import log, log_failure
from gorgo.picker.protocol.messages import ProtocolError
from gorgo.picker.protocol.output import CallOutput

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
