"""The picker's services on grpcio's server.

Theory of operation. Each call has a reader beside the coroutine that grpcio cancels with the call: a pending read is
never cancelled, because grpcio leaks the memory of one that is. Answers are queued and written in order by whoever
holds the write lock. The reader waits for them before it reads on: the queue has the answers to one message at most.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from typing import Any

from gorgo.config.addresses import split_bind
from gorgo.config.model import TlsConfig
from gorgo.errors import InvalidValueError, MissingExtra
from gorgo.live.logs import log
from gorgo.picker.transport.limits import CLOSE_S, KEEPALIVE_ANSWER_S, KEEPALIVE_S, TransportLimits
from gorgo.picker.transport.services import Services
from gorgo.picker.transport.streams import ServedCall, Status
from gorgo.picker.transport.tls import PemPair, picker_tls

try:
    import grpc
except ImportError as error:
    raise MissingExtra("the transport grpcio needs the extra: pip install 'gorgo-router[picker]'") from error

_CODES = {code.value[0]: code for code in grpc.StatusCode}


class GrpcioServer:
    """One listening port on grpcio."""

    def __init__(self, services: Services, limits: TransportLimits) -> None:
        self._services = services
        self._server = grpc.aio.server(options=_options(limits))
        self._server.add_generic_rpc_handlers((_Handler(services),))

    def bind(self, bind: str, tls: TlsConfig) -> tuple[str, int]:
        """Listen; return host and actual port. Raises `ConfigError`."""
        host, port = split_bind(bind)
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        picker_tls(tls)  # grpcio does not say what is wrong with a pair
        try:
            if tls.cert is None:
                bound = self._server.add_insecure_port(address)
            else:
                bound = self._server.add_secure_port(address, _credentials(PemPair(tls)))
        except RuntimeError as error:
            found = f"cannot listen on {bind}"
            raise InvalidValueError("picker.bind", found, "an address of this machine and a free port") from error
        return host, bound

    async def serve_calls(self, closing: asyncio.Event) -> None:
        """Serve until `closing` is set; then end all calls with OK."""
        await self._server.start()
        try:
            await closing.wait()
        finally:
            self._services.release_all()
            await self._server.stop(CLOSE_S)

    def start_drain(self) -> None:
        """Nothing: grpcio announces its end only as it closes the port."""


def _options(limits: TransportLimits) -> list[tuple[str, int]]:
    return [
        ("grpc.max_receive_message_length", limits.message_bytes),
        ("grpc.max_send_message_length", limits.message_bytes),
        ("grpc.max_concurrent_streams", limits.calls),
        # A second process on the port is an error, as for `gorgo serve`.
        ("grpc.so_reuseport", 0),
        ("grpc.keepalive_time_ms", round(KEEPALIVE_S * 1000)),
        ("grpc.keepalive_timeout_ms", round(KEEPALIVE_ANSWER_S * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        # Envoy's own signs of life, where they are configured, every ten seconds at most.
        ("grpc.http2.min_ping_interval_without_data_ms", 5_000),
    ]


def _credentials(pair: PemPair) -> Any:
    def renewed() -> Any:
        changed = pair.read_changed()
        return None if changed is None else grpc.ssl_server_certificate_configuration([changed])

    first = grpc.ssl_server_certificate_configuration([pair.read()])
    return grpc.dynamic_ssl_server_credentials(first, renewed, require_client_authentication=False)


class _Handler(grpc.GenericRpcHandler):  # type: ignore[misc] # grpcio has no types
    """Every method as a stream of bytes in both directions."""

    def __init__(self, services: Services) -> None:
        self._services = services

    def service(self, handler_call_details: Any) -> Any:
        method = str(handler_call_details.method)

        async def run(_: object, context: Any) -> None:
            await GrpcioCall(self._services, context).run(method)

        return grpc.stream_stream_rpc_method_handler(run)


class GrpcioCall:
    """One call: the `Output` of its service."""

    __slots__ = (
        "_call",
        "_context",
        "_ended",
        "_feeding",
        "_queue",
        "_services",
        "_status",
        "_text",
        "_writer",
        "_writing",
    )

    def __init__(self, services: Services, context: Any) -> None:
        self._services = services
        self._context = context
        self._queue: deque[bytes] = deque()
        self._writing = asyncio.Lock()
        self._writer: asyncio.Task[None] | None = None
        #: The reader passes a message on, and writes its answers after it.
        self._feeding = False
        #: Done once the call may end.
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._status, self._text = Status.OK, ""
        self._call: ServedCall | None = None

    async def run(self, method: str) -> None:
        """Serve the call until it has ended."""
        call = self._call = self._services.open_call(method, self)
        if call is None:
            await self._context.abort(_CODES[Status.UNIMPLEMENTED], f"unknown method {method[:100]}")
            return
        reader = asyncio.create_task(self._read(call))
        try:
            await self._ended
        finally:
            self._end()
            self._services.close(call)
        await self._write()
        if self._status is not Status.OK:
            await self._context.abort(_CODES[self._status], self._text)
        del reader  # it ends by itself with the call

    def send_message(self, message: bytes) -> None:
        if self._ended.done():
            return
        self._queue.append(message)
        if self._writer is None and not self._feeding:
            self._writer = asyncio.create_task(self._write_later())

    def end_call(self) -> None:
        self._end()

    def fail_call(self, status: Status, text: str) -> None:
        if not self._ended.done():
            self._status, self._text = status, text
            self._end()

    def _end(self) -> None:
        if not self._ended.done():
            self._ended.set_result(None)

    async def _read(self, call: ServedCall) -> None:
        try:
            while not self._ended.done():
                message = await self._context.read()
                if message is grpc.aio.EOF:
                    break
                self._feeding = True
                call.feed(message)
                self._feeding = False
                if self._queue:
                    await self._write()
        except Exception as failure:  # noqa: BLE001 - grpcio has no narrow type for a call that has ended
            if not self._ended.done():
                log("call_lost", level=logging.DEBUG, error=type(failure).__name__)
        self._end()

    async def _write_later(self) -> None:
        try:
            await self._write()
        except Exception as failure:  # noqa: BLE001 - as above
            log("call_lost", level=logging.DEBUG, error=type(failure).__name__)
            self._end()
        finally:
            self._writer = None

    async def _write(self) -> None:
        """Write what is queued, in order."""
        async with self._writing:
            while self._queue:
                await self._context.write(self._queue.popleft())
