"""The methods that the picker serves on one port, by their full names; and one call as a transport sees it.

Owns the seam between a transport and a service (`Output`, `ServedCall`), the bounds of connections, the table of the
methods, the end of open calls before a stop, and the status of gRPC health. Leaves the calls of ext_proc to
`gorgo.picker.call`, and connections to `gorgo.picker.transport.connection`.

Theory of operation. A transport calls `ServedCall.feed` with each message and `ServedCall.close` at the end of its
input, whatever the reason. A service answers by `Output`, at once or later. No method waits.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol, Self

from gorgo.config.model import LimitsConfig
from gorgo.core.record import record
from gorgo.live.logs import log, log_failure
from gorgo.picker.protocol.messages import CallOutput, ProtocolError
from gorgo.picker.protocol.protos import DecodeError, HealthCheckRequest, HealthCheckResponse, ServingStatus

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


# gRPC health: whether the process is alive, whether it may be asked, and whether it can decide.
#
# `liveness` is SERVING for as long as the process answers, `deciding` until Envoy has to leave it: an own Envoy goes on
# without a picker that is not, and one without a replica has an answer, 503 with `Retry-After`. `readiness`, the name
# of the ext_proc service and the empty name are what `/ready` is: not while the process stops, no replica can serve, or
# a fleet source has no result yet.


LIVENESS, DECIDING = "liveness", "deciding"
#: Names of the one status that can change.
READINESS = ("readiness", "envoy.service.ext_proc.v3.ExternalProcessor", "")
#: Calls of `Watch` at a time: Envoys, gateways and probes of a cluster, and each is looked at four times a second.
MAX_WATCHES = 512
#: Between two looks at the state, s: below the second of Envoy's shortest usual interval of health checks.
INTERVAL_S = 0.25

_SERVING: bytes = HealthCheckResponse(status=ServingStatus.SERVING).SerializeToString()
_NOT_SERVING: bytes = HealthCheckResponse(status=ServingStatus.NOT_SERVING).SerializeToString()
_UNKNOWN: bytes = HealthCheckResponse(status=ServingStatus.SERVICE_UNKNOWN).SerializeToString()


class Health:
    """The statuses, and the calls that watch them.

    `is_ready` returns whether the process can decide, `is_left` whether an own Envoy has to go on without it.
    """

    def __init__(self, is_ready: Callable[[], bool], is_left: Callable[[], bool] = lambda: False) -> None:
        self._is_ready = is_ready
        self._is_left = is_left
        self._subscribers: set[WatchCall] = set()

    async def run(self) -> None:
        """Send changes to those who watch, until cancelled."""
        while True:
            self.update()
            await asyncio.sleep(INTERVAL_S)

    def update(self) -> None:
        """Send the status to each watching call that has another one. The state is looked at once for all."""
        answers: dict[str, bytes] = {}
        for subscriber in tuple(self._subscribers):
            service = subscriber.service
            answer = answers.get(service)
            if answer is None:
                answer = answers[service] = self.answer(service) or _UNKNOWN
            subscriber.send_status(answer)

    def answer(self, service: str) -> bytes | None:
        """Return the serialized answer for a service; `None` for an unknown one."""
        if service == LIVENESS:
            return _SERVING
        if service == DECIDING:
            return _NOT_SERVING if self._is_left() else _SERVING
        if service in READINESS:
            return _SERVING if self._is_ready() else _NOT_SERVING
        return None

    def check(self, output: Output) -> CallHandlers:
        """Open a call of `Check`: a request, and its answer."""

        def take_message(message: bytes) -> None:
            answer = self.answer(_service(message))
            if answer is None:
                output.fail_call(Status.NOT_FOUND, f"unknown service; expected {LIVENESS} or {READINESS[0]}")
                return
            output.send_message(answer)
            output.end_call()

        return CallHandlers(take_message, nothing_open)

    def watch(self, output: Output) -> CallHandlers:
        """Open a call of `Watch`: the status now, and each other one from then on."""
        call = WatchCall(self, output, self._subscribers)
        return CallHandlers(call.subscribe, call.unsubscribe)


class WatchCall:
    """One call of `Watch`."""

    __slots__ = ("_health", "_last", "_output", "_service", "_subscribers")

    def __init__(self, health: Health, output: Output, subscribers: set[WatchCall]) -> None:
        self._health = health
        self._output = output
        self._subscribers = subscribers
        self._service: str | None = None
        self._last = b""

    def subscribe(self, message: bytes) -> None:
        """Take the request."""
        if self._service is not None:
            raise ProtocolError("expected one HealthCheckRequest")
        if len(self._subscribers) >= MAX_WATCHES:
            self._output.fail_call(Status.RESOURCE_EXHAUSTED, f"{MAX_WATCHES} calls of Watch are open")
            return
        self._service = _service(message)
        self._subscribers.add(self)
        self.send_status(self._health.answer(self._service) or _UNKNOWN)

    @property
    def service(self) -> str:
        """Return the service that is watched."""
        assert self._service is not None, "subscribers have a service"
        return self._service

    def send_status(self, answer: bytes) -> None:
        """Send the status if it is another than the last one."""
        if answer != self._last:
            self._last = answer
            self._output.send_message(answer)

    def unsubscribe(self) -> None:
        """Send no more."""
        self._subscribers.discard(self)


def _service(message: bytes) -> str:
    try:
        return str(HealthCheckRequest.FromString(message).service)
    except DecodeError:
        raise ProtocolError("expected a serialized HealthCheckRequest") from None


PROCESS = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
ACCESS_LOGS = "/envoy.service.accesslog.v3.AccessLogService/StreamAccessLogs"
CHECK = "/grpc.health.v1.Health/Check"
WATCH = "/grpc.health.v1.Health/Watch"


class Services:
    """Opens calls by the name of their method, and ends the open ones before a stop."""

    def __init__(self, openers: Mapping[str, Opener]) -> None:
        self._openers = openers
        self._open: set[ServedCall] = set()

    def open_call(self, method: str, output: Output) -> ServedCall | None:
        """Return a new call; `None` for an unknown method."""
        opener = self._openers.get(method)
        if opener is None:
            return None
        call = ServedCall(method, opener, output)
        self._open.add(call)
        return call

    def close(self, call: ServedCall) -> None:
        """End a call of `open`: its input is over, or its connection lost."""
        self._open.discard(call)
        call.close()

    def release_all(self) -> None:
        """End every open call with OK."""
        for call in tuple(self._open):
            call.release()

    def __len__(self) -> int:
        return len(self._open)


def services(process: Opener, take_access_log: Callable[[bytes], None], health: Health) -> Services:
    """Return the services of a picker.

    `process` opens a call of ext_proc, `take_access_log` takes a message of the access log.
    """
    return Services(
        {
            PROCESS: process,
            # Entries have no answer but the end.
            ACCESS_LOGS: lambda _: CallHandlers(take_access_log, nothing_open),
            CHECK: health.check,
            WATCH: health.watch,
        }
    )
