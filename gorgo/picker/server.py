"""The endpoint picker as a process: Envoy calls it for each request.

At the first signal `readiness` turns NOT_SERVING, and calls are decided until none is open or the grace period is over.
Then the open ones end with status OK: Envoy carries their replies on without the picker. The picker refuses nothing
because it stops, since Envoy can serve what is not refused.
"""

from __future__ import annotations

import asyncio
from binascii import a2b_base64
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from typing import Any

from gorgo.config.model import Config
from gorgo.core.numeric import MAX_AMOUNT
from gorgo.core.stream import Usage
from gorgo.live.process import ProcessOptions, Ready, run_process
from gorgo.picker.call import PickerCall
from gorgo.picker.lifetime import BODY_BYTES, LogEntry, PickerExchange
from gorgo.picker.protocol.messages import (
    BODY,
    LB,
    OWN,
    SERVED,
    TRIED,
    USAGE,
    ProtocolError,
    ServedBy,
    fields_of,
    read_tried,
    text_of,
)
from gorgo.picker.protocol.protos import DecodeError, StreamAccessLogsMessage
from gorgo.picker.state import PICKER, PickerState
from gorgo.picker.transport.server import Http2Server
from gorgo.picker.transport.services import CallHandlers, Health, Output, TransportLimits, services

# Entries of Envoy's access log: usage, the exact time of the first byte of a body, and why an answer ended. Each entry
# completes the exchange whose id Envoy has in its dynamic metadata; others are counted. An entry alone releases no
# load: Envoy loses some of them silently.


#: Tag of an entry with the time from the request's first byte to the first of the answer's body, us.
FIRST_BODY_TAG = "first_body_us"
#: Envoy's flags of failures that are the replica's or its network's, in the proxy's words, most telling first.
_FAILURES = (
    ("upstream_connection_failure", "connect_failed"),
    ("dns_resolution_failure", "connect_failed"),
    ("no_healthy_upstream", "connect_failed"),
    ("upstream_overflow", "connections_exhausted"),
    ("upstream_request_timeout", "timeout"),
    ("duration_timeout", "total_timeout"),
    ("upstream_max_stream_duration_reached", "total_timeout"),
    ("upstream_remote_reset", "disconnected"),
    ("upstream_connection_termination", "disconnected"),
    ("upstream_protocol_error", "disconnected"),
    ("stream_idle_timeout", "timeout"),
)
_DISCONNECTS = ("downstream_connection_termination", "downstream_remote_reset", "downstream_protocol_error")
#: Details of an answer that broke off after its head.
_BROKEN = "upstream_reset_after_response_started"
_UPSTREAM = "via_upstream"
#: Longest text of an answer: in base 64, three bytes have four characters.
_BODY_CHARS = -(-BODY_BYTES // 3) * 4
#: Longest time that a tag may say, us: an hour.
_MAX_TAG_US = 3_600_000_000

_parse = StreamAccessLogsMessage.FromString


def take_access_log(state: PickerState, message: bytes) -> None:
    """Complete the exchanges of one serialized `StreamAccessLogsMessage`. Raises `ProtocolError`."""
    try:
        batch = _parse(message)
    except DecodeError:
        raise ProtocolError("expected a serialized StreamAccessLogsMessage") from None
    for entry in read_entries(batch):
        if entry is None:
            state.telemetry.metrics.log_entry("undecided")
            continue
        exchange = state.open_exchanges.get(entry.exchange_id)
        if isinstance(exchange, PickerExchange):
            exchange.complete(entry)
            state.telemetry.metrics.log_entry("matched")
        else:
            state.telemetry.metrics.log_entry("late" if state.open_exchanges.is_own(entry.exchange_id) else "unknown")


def read_entries(batch: Any) -> Iterator[LogEntry | None]:
    """Yield the entries with an id, and `None` for each answer of a replica that no picker has chosen.

    Other entries without an id are of answers that Envoy has given itself, or the picker by it.
    """
    for entry in batch.http_logs.log_entry:
        common = entry.common_properties
        if common.intermediate_log_entry:
            continue
        # Each map and message is asked for once: an object is made for it each time.
        metadata = common.metadata.filter_metadata
        own_fields = fields_of(metadata, OWN)
        exchange_id = text_of(own_fields, "id")
        if exchange_id is not None:
            yield _read(exchange_id, own_fields, metadata, common, entry.response)
        elif entry.response.response_code_details.startswith(_UPSTREAM):
            yield None


def _read(exchange_id: str, own_fields: Any, metadata: Any, common: Any, response: Any) -> LogEntry:
    details = response.response_code_details
    failure, disconnected = None, False
    if common.HasField("response_flags"):
        flags = {descriptor.name for descriptor, _ in common.response_flags.ListFields()}
        failure = next((reason for flag, reason in _FAILURES if flag in flags), None)
        disconnected = not flags.isdisjoint(_DISCONNECTS)
    if failure is None and details.startswith(_BROKEN):
        failure = "disconnected"
    status = response.response_code.value
    if not 100 <= status < 600:
        status = 0
    served = text_of(fields_of(metadata, LB), SERVED) or _address(common.upstream_remote_address)
    left, headers = fields_of(metadata, USAGE), response.response_headers
    return LogEntry(
        exchange_id=exchange_id,
        status=status,
        disconnected=disconnected,
        # A client that leaves resets the replica's stream too.
        failure=None if disconnected else failure,
        first_body_s=_first_body_s(common.custom_tags),
        usage=_usage(left),
        body=_body(left),
        served=None if served is None else ServedBy(served, status, read_tried(text_of(own_fields, TRIED))),
        headers=tuple((name.encode(), value.encode()) for name, value in headers.items()) if headers else (),
        is_local=bool(details) and not details.startswith(_UPSTREAM),
    )


def _first_body_s(tags: Any) -> float | None:
    text = tags.get(FIRST_BODY_TAG, "")
    if not (text.isascii() and text.isdigit()) or len(text) > 10 or int(text) > _MAX_TAG_US:
        return None
    return int(text) / 1e6


def _body(fields: Any) -> bytes | None:
    """Return a short answer in one piece; `None` for any other."""
    text = text_of(fields, BODY)
    if text is None or len(text) > _BODY_CHARS:
        return None
    try:
        return a2b_base64(text, strict_mode=True)
    except ValueError:
        return None


def _usage(fields: Any) -> Usage | None:
    """Return the usage that Envoy has read of the answer; `None` without one."""
    if fields is None or BODY in fields:
        return None
    prompt = _count(fields, "prompt_tokens")
    output = _count(fields, "completion_tokens")
    if prompt is None and output is None:
        return None
    return Usage(prompt, _count(fields, "cached_tokens"), output)


def _count(fields: Any, name: str) -> int | None:
    """Return a count, which Envoy has as a number or as text."""
    value = fields.get(name)
    if value is None:
        return None
    number = value.number_value if value.WhichOneof("kind") == "number_value" else _number(value.string_value)
    return int(number) if 0 <= number <= MAX_AMOUNT else None


def _number(text: str) -> float:
    return float(text) if text.isascii() and text.isdigit() and len(text) < 16 else -1.0


def _address(address: Any) -> str | None:
    socket = address.socket_address
    host, port = socket.address, socket.port_value
    if not host or not port:
        return None
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


#: Between two resolutions of the names in replicas' URLs, s: the usual time for which DNS answers may be cached.
RESOLVE_S = 30.0
#: Between two looks at the open calls of a picker that stops, s.
_IDLE_CHECK_S = 0.05


async def serve(
    config: Config,
    options: ProcessOptions,
    *,
    ready: Ready | None = None,
    shutdown: asyncio.Event | None = None,
) -> None:
    """Run the picker until `shutdown` or a signal. Parameters and errors as of `run_process`."""
    hold_s = config.picker.hold_s
    await run_process(
        config,
        options,
        lambda live: GrpcFrontEnd(PickerState(live, hold_s)),
        kind=PICKER,
        ready=ready,
        shutdown=shutdown,
    )


class GrpcFrontEnd:
    """The listener for Envoy."""

    def __init__(self, state: PickerState) -> None:
        self.state = state
        self.health = Health(state.live.is_ready, partial(_is_left, state))
        self._services = services(partial(_open_call, state), partial(take_access_log, state), self.health)
        self._server = Http2Server(self._services, TransportLimits.of(state.live.config.limits), state.live.buffers)
        self.address = ("", 0)

    async def start(self) -> None:
        """Listen, and resolve the names of replicas. Raises `ConfigError`."""
        picker = self.state.live.config.picker
        self.address = self._server.bind(picker.bind, picker.tls)
        if self._server.tls is not None:
            self.state.telemetry.metrics.listeners.tls.append(self._server.tls)
        await self.state.endpoints.resolve()

    async def serve_requests(self, closing: asyncio.Event) -> None:
        """Serve Envoy until `closing` is set."""
        loops = [asyncio.create_task(self.health.run()), asyncio.create_task(_resolve(self.state))]
        try:
            await self._server.serve_calls(closing)
        finally:
            for loop in loops:
                loop.cancel()
            await asyncio.wait(loops)

    async def end_exchanges(self, stop_now: asyncio.Event) -> None:
        """Wait until no call is open, within the grace period; `serve` ends those that remain."""
        self.health.update()
        self._server.start_drain()
        deadline_s = self.state.routing.clock() + self.state.live.limits.shutdown_grace_s
        while self.state.calls and not stop_now.is_set() and self.state.routing.clock() < deadline_s:
            with suppress(TimeoutError):
                await asyncio.wait_for(stop_now.wait(), _IDLE_CHECK_S)


def _open_call(state: PickerState, output: Output) -> CallHandlers:
    call = PickerCall(state, output)
    return CallHandlers(call.feed, call.closed)


def _is_left(state: PickerState) -> bool:
    """Return whether an own Envoy has to go on without the picker: it stops, and Envoy has a list of the replicas.

    Without a list an Envoy that is not answered has no replica, so it calls until the picker has ended.
    """
    return state.live.stopping and not state.live.config.fleet_sources


async def _resolve(state: PickerState) -> None:
    while True:
        await asyncio.sleep(RESOLVE_S)
        await state.endpoints.resolve()
